"""Who drafts and who verifies in the next forward.

A policy sees every running request and answers, for each, True (verify) or False (draft one more
token). Its answer is a function of its arguments alone, so tensor-parallel ranks agree without
talking. A row with no room to draft (``pending >= max_draft``) always verifies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from aspire_sglang.speculation.ablations import ConstantCostPolicy, FeedbackPolicy
from aspire_sglang.speculation.adaptive import AspirePolicy, ShadowPricePolicy
from aspire_sglang.speculation.cost_model import CostModel
from aspire_sglang.speculation.global_length import GlobalLengthPolicy
from aspire_sglang.speculation.rows import (
    PLAIN_PHASE,
    Policy,
    RowState,
    StepwisePolicy,
    check_at_least_one,
)

__all__ = [
    "AspirePolicy",
    "AutoregressivePolicy",
    "ConstantCostPolicy",
    "FeedbackPolicy",
    "FixedPolicy",
    "GlobalLengthPolicy",
    "Policy",
    "RowState",
    "ShadowPricePolicy",
    "StaggeredPolicy",
    "cap_verify_tokens",
    "make_policy",
]


@dataclass(frozen=True, slots=True)
class AutoregressivePolicy(StepwisePolicy):
    """Plain decoding: every row verifies at every step, so no draft ever starts."""

    name: ClassVar[str] = "ar"
    plain_steps: ClassVar[int] = PLAIN_PHASE

    def decide(self, rows: Sequence[RowState], cost: CostModel) -> list[bool]:
        """True for every row."""
        return [True] * len(rows)


@dataclass(frozen=True, slots=True)
class FixedPolicy(StepwisePolicy):
    """Synchronized speculation: the batch drafts ``gamma`` tokens, then every row verifies.

    The barrier falls when the row furthest ahead has ``gamma`` drafts (or the most that any row
    may hold, if that is less). A row that joined in mid-round verifies there with the drafts it
    has and is in step from then on. A row with a smaller cap verifies whenever it reaches the cap,
    as it may not draft on, and again at the barrier.

    Args:
        gamma: drafts per round, >= 1.

    Raises:
        ValueError: ``gamma < 1``.
    """

    name: ClassVar[str] = "fixed"
    plain_steps: ClassVar[int] = 1
    gamma: int = 5

    def __post_init__(self) -> None:
        check_at_least_one(self.gamma, "gamma")

    def decide(self, rows: Sequence[RowState], cost: CostModel) -> list[bool]:
        """True for every row at the barrier, else for rows at their cap."""
        stride = min(self.gamma, max((row.max_draft for row in rows), default=0))
        barrier = any(row.pending >= stride for row in rows)
        return [barrier or row.pending >= row.max_draft for row in rows]


@dataclass(frozen=True, slots=True)
class StaggeredPolicy(StepwisePolicy):
    """Fixed stride with spread phases: about B/(gamma + 1) of B rows verify at each step.

    SparseSpec's unified schedule (arXiv 2512.01278). The first round of a row is cut short to
    ``gamma - slot % (gamma + 1)`` drafts, and all later rounds have ``gamma``; so rows that start
    together in neighbouring slots stay one step apart.

    Args:
        gamma: drafts per round, >= 1.

    Raises:
        ValueError: ``gamma < 1``.
    """

    name: ClassVar[str] = "staggered"
    plain_steps: ClassVar[int] = 1
    gamma: int = 5

    def __post_init__(self) -> None:
        check_at_least_one(self.gamma, "gamma")

    def decide(self, rows: Sequence[RowState], cost: CostModel) -> list[bool]:
        """True for rows at the end of their round or at their cap."""
        return [row.pending >= min(self._stride(row), row.max_draft) for row in rows]

    def _stride(self, row: RowState) -> int:
        return self.gamma - (row.slot % (self.gamma + 1) if row.verifies == 0 else 0)


_POLICIES: dict[str, Callable[..., Policy]] = {
    AutoregressivePolicy.name: AutoregressivePolicy,
    FixedPolicy.name: FixedPolicy,
    StaggeredPolicy.name: StaggeredPolicy,
    AspirePolicy.name: AspirePolicy,
    ShadowPricePolicy.name: ShadowPricePolicy,
    GlobalLengthPolicy.name: GlobalLengthPolicy,
    FeedbackPolicy.name: FeedbackPolicy,
    ConstantCostPolicy.name: ConstantCostPolicy,
}


def make_policy(name: str, **options: Any) -> Policy:
    """Build the policy called ``name`` with its keyword ``options``.

    Raises:
        ValueError: no policy has that name, or an option is outside its range.
        TypeError: the policy has no such option.
    """
    if name not in _POLICIES:
        raise ValueError(f"unknown policy {name!r}; valid names: {', '.join(_POLICIES)}")
    return _POLICIES[name](**options)


def cap_verify_tokens(
    decisions: Sequence[bool], rows: Sequence[RowState], max_tokens: int
) -> list[int]:
    """Fit a policy's decisions into a forward of at most ``max_tokens`` query tokens.

    Returns, per row, 0 for a draft row (1 token) or the number of query tokens of its verify row:
    the bonus token and its first drafts. The total never exceeds ``max_tokens``.

    Rows that may not draft on are served first, then the other verifies, each group oldest first
    (ties in row order). A verify that does not fit is put off, and its row drafts instead; it can
    do so only until it reaches ``max_draft``, so nobody starves. If the rows at ``max_draft``
    alone exceed the limit, the youngest of them verify fewer drafts than they hold; the others
    of their drafts must be dropped, which costs work and never changes the output. This is rare
    when ``max_tokens`` is at least twice the number of rows.

    Args:
        decisions: one answer of ``Policy.decide`` per row.
        rows: the rows, in the same order.
        max_tokens: most query tokens in the forward.

    Raises:
        ValueError: fewer ``max_tokens`` than rows, different lengths, or a decision to draft for a
            row that holds ``max_draft`` drafts.
    """
    if len(decisions) != len(rows):
        raise ValueError(f"{len(decisions)} decisions for {len(rows)} rows")
    if max_tokens < len(rows):
        raise ValueError(f"{len(rows)} rows need at least as many tokens, got {max_tokens}")
    forced = [row.pending >= row.max_draft for row in rows]
    for index, (verify, must) in enumerate(zip(decisions, forced, strict=True)):
        if must and not verify:
            raise ValueError(f"row {index} may not draft beyond {rows[index].max_draft}")

    spare = max_tokens - len(rows)
    lengths = [0] * len(rows)
    verifying = [index for index, verify in enumerate(decisions) if verify]
    for index in sorted(verifying, key=lambda i: (not forced[i], -rows[i].age, i)):
        pending = rows[index].pending
        if pending <= spare or forced[index]:
            drafts = min(pending, spare)
            lengths[index] = drafts + 1
            spare -= drafts
    return lengths
