#!/usr/bin/env bash
# Create the virtual environment .venv and install the project into it. Does nothing when that is
# done already. Needs Python 3.11 or 3.12 and a reachable package index; nothing else.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="${ASPIRE_VENV:-$root/.venv}"
stamp="$venv/.aspire-installed"

say() { printf '%s\n' "$*" >&2; }
die() { say "error: $*"; exit 1; }

# A shim or a symlink may exist and still not run, so every candidate is asked for its version.
is_wanted_python() {
    "$1" -c 'import sys; sys.exit(sys.version_info[:2] not in {(3, 11), (3, 12)})' \
        >/dev/null 2>&1
}

# Debian ships a Python whose venv module fails for want of ensurepip.
can_make_venv() { "$1" -c 'import ensurepip, venv' >/dev/null 2>&1; }

candidates() {
    local name
    for name in "${PYTHON:-}" python3.12 python3.11 python3 python; do
        # All places on PATH: the first may be a shim for a version that is not installed.
        [ -n "$name" ] && type -ap "$name" 2>/dev/null
    done
    local pyenv="${PYENV_ROOT:-$HOME/.pyenv}/versions" uv="${XDG_DATA_HOME:-$HOME/.local/share}/uv"
    for name in "$pyenv"/3.12.*/bin/python "$pyenv"/3.11.*/bin/python \
        "$uv"/python/cpython-3.12*/bin/python3 "$uv"/python/cpython-3.11*/bin/python3; do
        [ -x "$name" ] && printf '%s\n' "$name"
    done
    return 0
}

find_python() {
    local python without_venv=""
    while IFS= read -r python; do
        is_wanted_python "$python" || continue
        if can_make_venv "$python"; then
            printf '%s\n' "$python"
            return
        fi
        without_venv="${without_venv:-$python}"
    done < <(candidates)
    if [ -n "$without_venv" ]; then
        die "$without_venv lacks the modules venv and ensurepip;" \
            "on Debian and Ubuntu they are in the package python3.11-venv or python3.12-venv."
    fi
    die "Python 3.11 or 3.12 is needed, but found neither on PATH nor with pyenv or uv;" \
        "point the variable PYTHON at one."
}

# What the installation depends on: the declared dependencies and where the project lies.
wanted_stamp() { { cat "$root/pyproject.toml"; printf '%s\n' "$root"; } | cksum; }

if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$(wanted_stamp)" ] &&
    is_wanted_python "$venv/bin/python"; then
    exit 0
fi

if ! is_wanted_python "$venv/bin/python"; then
    python="$(find_python)"
    say "creating $venv with $("$python" --version)"
    "$python" -m venv --clear "$venv"
fi
if [ ! -x "$venv/bin/uv" ]; then
    say "installing uv"
    "$venv/bin/python" -m pip --version >/dev/null 2>&1 ||
        "$venv/bin/python" -m ensurepip >/dev/null
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check uv ||
        die "pip could not install uv; is the package index reachable?"
fi
say "installing aspire-sglang and SGLang (several GiB, minutes on the first run)"
started=$SECONDS
# Bytecode is compiled once here, not by every process of every server where Python may not write it.
VIRTUAL_ENV="$venv" "$venv/bin/uv" pip install --quiet --compile-bytecode --editable "$root[demo,dev]" ||
    die "the installation failed; see the message above."
wanted_stamp >"$stamp"
say "installed in $((SECONDS - started)) s"
