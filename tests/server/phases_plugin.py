"""A plugin for tests: phases of plain steps of random lengths between short drafts.

With ``PHASES_OVERLAP`` set the scheduler overlaps its work with the forward, as it does on a GPU,
also that of a server without speculation. With ``PHASES_GPU_RULES`` set requests are decoded
plainly that a GPU decodes plainly.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any


def install(folder: Path) -> None:
    """Make this plugin discoverable for processes that have ``folder`` on their path."""
    target = folder / "aspire_test_phases-0.dist-info"
    target.mkdir(parents=True, exist_ok=True)
    (target / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: aspire-test-phases\nVersion: 0\n"
    )
    (target / "entry_points.txt").write_text(
        "[sglang.srt.plugins]\nzz_aspire_test_phases = tests.server.phases_plugin:load\n"
    )


def load() -> None:
    """Called by SGLang in every process that loads plugins."""
    from aspire_sglang.runtime.modes import ModeScheduler

    choice = random.Random(7)

    def plain_steps(self: Any, slots: Any, seq_lens: Any, states: Any, caps: Any) -> int:
        if any(state.pending for state in states):
            return 0
        return choice.choice([0, 0, 1, 1, 2, 3, 7, 40])

    ModeScheduler.plain_steps = plain_steps  # type: ignore[method-assign]
    if os.environ.get("PHASES_OVERLAP"):
        _overlap()
    if os.environ.get("PHASES_GPU_RULES"):
        _use_gpu_rules()


def _overlap() -> None:
    from aspire_sglang.cpu_platform.platform import TorchCpuPlatform
    from aspire_sglang.runtime.algorithm import AspireAlgorithm

    for owner, name in (
        (TorchCpuPlatform, "apply_server_args_defaults"),
        (AspireAlgorithm, "handle_server_args"),
    ):
        setattr(owner, name, _overlapping(getattr(owner, name)))


def _overlapping(original: Any) -> Any:
    def overlapped(self: Any, server_args: Any) -> None:
        original(self, server_args)
        server_args.disable_overlap_schedule = False

    return overlapped


def _use_gpu_rules() -> None:
    from types import SimpleNamespace

    from aspire_sglang.runtime import introspection, logit_rules
    from aspire_sglang.runtime.worker import AspireWorker

    AspireWorker.plain_for_parameters = True
    # What an answer says of itself, and SGLang's own penalty counters.
    setattr(introspection, "cpu_platform", SimpleNamespace(is_active=lambda: False))  # noqa: B010
    setattr(logit_rules, "is_aspire", lambda _: False)  # noqa: B010
