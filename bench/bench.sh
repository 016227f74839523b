#!/usr/bin/env bash
# Speed of the attention kernels for the CPU on this machine. Arguments are passed on.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
"$root/bench/env.sh"
exec "${ASPIRE_VENV:-$root/.venv}/bin/python" "$root/bench/cpu_kernels.py" "$@"
