#!/usr/bin/env bash
# The demo. Arguments are passed on; see --help.
set -euo pipefail
# Where it is set every process of every server compiles half of SGLang at its start.
unset PYTHONDONTWRITEBYTECODE
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
"$root/bench/env.sh"
# exec: Ctrl-C and SIGTERM go to the program that ends the servers, not to a shell around it.
exec "${ASPIRE_VENV:-$root/.venv}/bin/python" "$root/bench/demo.py" "$@"
