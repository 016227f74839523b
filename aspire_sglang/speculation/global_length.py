"""One draft length for all requests: the ablation of a length per request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from aspire_sglang.speculation.adaptive import Throughput
from aspire_sglang.speculation.cost_model import CostModel
from aspire_sglang.speculation.rows import RowState, StepwisePolicy, check_at_least_one


@dataclass(frozen=True, slots=True)
class GlobalLengthPolicy(StepwisePolicy):
    """One draft length for all requests, from the paper's rule on their mean (an ablation).

    What it loses against the policy ``aspire`` is what a length per request is worth. Requests
    draft and verify on their own schedules; only the length is shared.

    Args:
        gamma_max: longest draft considered, >= 1.
        first_draft: drafts before a request's first verify, >= 1.

    Raises:
        ValueError: an argument is below 1.
    """

    name: ClassVar[str] = "global"
    gamma_max: int = 16
    first_draft: int = 3

    def __post_init__(self) -> None:
        check_at_least_one(self.gamma_max, "gamma_max")
        check_at_least_one(self.first_draft, "first_draft")

    def decide(self, rows: Sequence[RowState], cost: CostModel) -> list[bool]:
        """True for rows that hold as many drafts as the common length."""
        if not rows:
            return []
        count = len(rows)
        mean = RowState(
            committed=sum(row.committed for row in rows) // count,
            pending=0,
            draft_kv=sum(row.draft_kv for row in rows) // count,
            rate=sum(row.rate for row in rows) / count,
            max_draft=self.gamma_max,
        )
        rule = Throughput.of([mean], cost, self.gamma_max, count)
        (length,) = rule.best_lengths(np.array([mean.rate]))
        first = min(length, self.first_draft)
        return [
            row.pending >= min(length if row.verifies else first, row.max_draft) for row in rows
        ]
