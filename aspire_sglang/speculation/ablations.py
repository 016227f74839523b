"""Policies that leave out a part of the adaptive ones: what they lose is what the part is worth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from aspire_sglang.speculation.cost_model import CostModel
from aspire_sglang.speculation.rows import RowState, StepwisePolicy, check_at_least_one


def adjusted_length(length: int, drafts: int, accepted: int) -> int:
    """The next draft length of the feedback rule, at least 1.

    One more after a whole run that was accepted, one less after one of which less than half
    was accepted (ASPIRE-FSM in arXiv 2609.17943).

    Args:
        length: present length.
        drafts: drafts of the verified run, >= 1.
        accepted: how many of them were accepted.
    """
    if accepted == drafts:
        return length + (drafts >= length)
    return max(length - 1, 1) if 2 * accepted < drafts else length


@dataclass(frozen=True, slots=True)
class FeedbackPolicy(StepwisePolicy):
    """A length per request that moves by one with every verify, without a model of anything.

    Args:
        gamma_max: longest draft, >= 1.

    Raises:
        ValueError: ``gamma_max < 1``.
    """

    name: ClassVar[str] = "feedback"
    gamma_max: int = 16

    def __post_init__(self) -> None:
        check_at_least_one(self.gamma_max, "gamma_max")

    def decide(self, rows: Sequence[RowState], cost: CostModel) -> list[bool]:
        """True for rows that hold their length of drafts."""
        return [row.pending >= min(row.length, self.gamma_max, row.max_draft) for row in rows]


@dataclass(frozen=True, slots=True)
class ConstantCostPolicy(StepwisePolicy):
    """The paper's rule with a draft that always costs the same share of a verify.

    The length of a request is the g in 0..gamma_max with the highest ``E(g) / (1 + c * g)``,
    ``E(g) = (1 - a**(g+1)) / (1 - a)`` at its acceptance a, whatever its context and the batch.

    Args:
        gamma_max: longest draft considered, >= 1.
        cost_ratio: ``c``, time of a draft step over that of a verify step, > 0.
        first_draft: drafts before a request's first verify, >= 1.

    Raises:
        ValueError: an argument is out of range.
    """

    name: ClassVar[str] = "constant_cost"
    gamma_max: int = 16
    cost_ratio: float = 0.2
    first_draft: int = 3

    def __post_init__(self) -> None:
        check_at_least_one(self.gamma_max, "gamma_max")
        check_at_least_one(self.first_draft, "first_draft")
        if not self.cost_ratio > 0.0:
            raise ValueError(f"cost_ratio must be positive, got {self.cost_ratio}")

    def decide(self, rows: Sequence[RowState], cost: CostModel) -> list[bool]:
        """True for rows that hold as many drafts as their length."""
        drafts = np.arange(self.gamma_max + 1)
        rates = np.array([row.rate for row in rows], dtype=np.float64)[:, None]
        gain = np.cumsum(rates**drafts, axis=1) / (1.0 + self.cost_ratio * drafts)
        lengths: list[int] = gain.argmax(axis=1).tolist()
        return [
            row.pending
            >= min(length if row.verifies else min(length, self.first_draft), row.max_draft)
            for row, length in zip(rows, lengths, strict=True)
        ]
