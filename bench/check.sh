#!/usr/bin/env bash
# Style and types.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
"$root/bench/env.sh"
bin="${ASPIRE_VENV:-$root/.venv}/bin"
cd "$root"
"$bin/ruff" check .
"$bin/ruff" format --check .
"$bin/mypy" -p aspire_sglang
"$bin/mypy" -p bench
