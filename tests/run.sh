#!/usr/bin/env bash
# All tests that need no GPU. Arguments go to pytest, e.g. tests/run.sh tests/unit -k cost
set -euo pipefail
# Where it is set every process of every server compiles half of SGLang at its start.
unset PYTHONDONTWRITEBYTECODE
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
"$root/bench/env.sh"
cd "$root"
# `python -m`: the project root must be importable, for the tests use `bench`.
exec "${ASPIRE_VENV:-$root/.venv}/bin/python" -m pytest "$@"
