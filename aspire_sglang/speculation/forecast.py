"""What drafting is worth by the step costs, before anything has run.

Whether drafts pay is decided by the machine as much as by the text: where arithmetic is slow for
the memory, verifying takes what drafting saves. The forecast says so at start-up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from aspire_sglang.speculation.adaptive import Throughput
from aspire_sglang.speculation.cost_model import CostModel
from aspire_sglang.speculation.rows import RowState

RATE = 0.9
"""Accept rate of the forecast: what sparse contexts reach on text that is not hard."""

CONTEXTS = (500, 2000, 6000, 24_000, 96_000)
"""Context lengths of the forecast, in tokens; a server shows those that it can hold."""


class Forecast(NamedTuple):
    """One load.

    Attributes:
        rows: requests that run.
        context: tokens of each.
        speedup: decode speed over that without drafts, >= 1, as length 0 is a choice.
        gamma: drafts per verify that reach it.
    """

    rows: int
    context: int
    speedup: float
    gamma: int


def forecast(
    cost: CostModel, rows: int, context: int, draft_kv: int, gamma_max: int, rate: float = RATE
) -> Forecast:
    """The best length for equal requests and what it gains, by the paper's objective.

    Args:
        cost: fitted step costs.
        rows: requests that run, >= 1.
        context: committed tokens of each.
        draft_kv: KV tokens that a draft row reads.
        gamma_max: longest draft.
        rate: accept rate, in (0, 1).
    """
    row = RowState(committed=context, pending=0, draft_kv=draft_kv, rate=rate, max_draft=gamma_max)
    rule = Throughput.of([row], cost, gamma_max, rows)
    speeds = rule.throughput(np.array([rate]))[0]
    gamma = int(np.argmax(speeds))
    return Forecast(rows, context, float(speeds[gamma] / speeds[0]), gamma)


def forecasts(
    cost: CostModel,
    draft_kv: Callable[[list[int]], Sequence[int]],
    gamma_max: int,
    max_rows: int,
    max_context: int,
    kv_pool: int,
) -> list[Forecast]:
    """As many requests of every length in :data:`CONTEXTS` as the server can hold.

    Args:
        cost, gamma_max: as for :func:`forecast`.
        draft_kv: KV tokens that draft rows read, for committed tokens.
        max_rows: most running requests.
        max_context: longest context, in tokens.
        kv_pool: tokens in the KV pool.
    """
    lengths = [length for length in CONTEXTS if length < max_context and length <= kv_pool]
    return [
        forecast(cost, min(max_rows, kv_pool // length), length, reads, gamma_max)
        for length, reads in zip(lengths, draft_kv(lengths), strict=True)
    ]


def describe(found: Sequence[Forecast]) -> str:
    """One line for the start-up log."""
    if not found:
        return "no forecast, as no context that the server can hold is long enough"
    loads = (
        f"{each.rows} x {each.context} tokens {each.speedup:.2f}x"
        + (f" ({each.gamma} drafts)" if each.gamma else " (no drafts)")
        for each in found
    )
    return (
        f"where {RATE:.0%} of drafts are accepted, decode speed over plain is to be "
        + ", ".join(loads)
    )
