#!/usr/bin/env bash
# Remove what the other scripts made inside the project. The cached model stays: it is outside.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$root"
rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist ./*.egg-info \
    demo-report.json
find . -name __pycache__ -type d -prune -exec rm -rf {} +
