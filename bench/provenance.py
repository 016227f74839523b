"""What stands beside every result: how it came about, so that a figure can be judged later."""

from __future__ import annotations

import datetime
import shlex
from collections.abc import Sequence
from typing import Any

from aspire_sglang.cli import machine
from bench.paths import ROOT


def provenance(command: Sequence[str]) -> dict[str, Any]:
    """Command, time, commit, machine and versions.

    Args:
        command: what was run, without the interpreter.
    """
    return {
        "command": shlex.join(["python", *command]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": machine.commit(ROOT),
        "machine": machine.describe_machine(),
        "versions": machine.describe_versions(),
    }
