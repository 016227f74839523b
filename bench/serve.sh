#!/usr/bin/env bash
# Serve the demo's model with ASPIRE until Ctrl-C. Arguments are passed on; see --help.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
exec "$root/bench/demo.sh" --keep "$@"
