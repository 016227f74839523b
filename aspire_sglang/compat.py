"""Everything ASPIRE knows about the installed SGLang's version.

Algorithm code never looks here; runtime code asks this module instead of testing versions.
"""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, version
from typing import NoReturn

SUPPORTED_SGLANG = ("0.5.17",)
"""SGLang releases whose hook targets were read and tested."""


class UnsupportedSGLang(RuntimeError):
    """The installed SGLang is not one ASPIRE was tested with."""


def sglang_version() -> str:
    """Version of the installed SGLang, or ``"not installed"``."""
    try:
        return version("sglang")
    except PackageNotFoundError:
        return "not installed"


def require_supported_sglang() -> None:
    """Refuse an SGLang whose internals are unknown.

    Raises:
        UnsupportedSGLang: with the installed and the supported versions.
    """
    found = sglang_version()
    if found.split("+")[0] not in SUPPORTED_SGLANG:
        raise UnsupportedSGLang(
            f"aspire-sglang supports sglang {', '.join(SUPPORTED_SGLANG)}, but {found} is "
            f"installed; run: pip install sglang=={SUPPORTED_SGLANG[-1]}"
        )


def stop(*messages: str) -> NoReturn:
    """End the process with one line for the user per message.

    SGLang only logs an exception that a plugin raises and starts without it, so a fault found
    while the plugin loads must end the process here.
    """
    for message in messages:
        print(f"aspire-sglang: {message}", file=sys.stderr, flush=True)
    raise SystemExit(2)
