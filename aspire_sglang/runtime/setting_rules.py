"""Settings of the configuration that run on one platform only: the part of the table in
``combinations.py`` that is about ASPIRE's own options."""

from __future__ import annotations

from dataclasses import dataclass

from aspire_sglang.runtime.combinations import Refused, Untested, Verdict, Works

_LAYERED = "tests/unit/test_layered_contexts.py::"


@dataclass(frozen=True)
class Setting:
    """Values of an option of the configuration.

    Attributes:
        option: its name with that of its section.
        values: those that the row is about.
        on_cpu, on_gpu: what happens on either platform.
    """

    option: str
    values: tuple[str, ...]
    on_cpu: Verdict
    on_gpu: Verdict


SETTINGS = (
    Setting(
        "context.selection",
        ("refresh",),
        Works("tests/server/test_exactness.py::test_greedy_40_prompts"),
        Works("tests/gpu/test_engine.py::test_steps_ran_as_asked"),
    ),
    Setting(
        "context.selection",
        ("last_verify", "window"),
        Works(f"{_LAYERED}test_shared_lists"),
        Untested(),
    ),
    Setting(
        "context.selection",
        ("hybrid", "last_verify_per_layer"),
        Works(f"{_LAYERED}test_layers_share_the_pages_that_one_of_them_chose"),
        Works("tests/gpu/test_layered_engine.py::test_stock_finds_every_text_greedy"),
    ),
    Setting(
        "context.selection",
        ("delta",),
        Works(f"{_LAYERED}test_delta_has_a_list_per_group_of_layers"),
        Refused("runs on a CPU only"),
    ),
)
