#!/usr/bin/env bash
# Decode speed of ASPIRE against plain decoding on this machine. Arguments are passed on; see --help.
# The kernels alone: python bench/cpu_kernels.py
set -euo pipefail
# Where it is set every process of every server compiles half of SGLang at its start.
unset PYTHONDONTWRITEBYTECODE
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
"$root/bench/env.sh"
exec "${ASPIRE_VENV:-$root/.venv}/bin/python" "$root/bench/speed.py" --servers ASPIRE plain "$@"
