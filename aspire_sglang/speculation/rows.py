"""What a policy is: it sees the running requests and says who verifies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from aspire_sglang.speculation.cost_model import CostModel


# Not frozen: one is made per request and step, and frozen ones take three times as long to make.
@dataclass(slots=True)
class RowState:
    """One running request, as a policy sees it.

    Attributes:
        committed: S, tokens whose KV is final (full attention).
        pending: k, drafts waiting for a verify.
        draft_kv: KV tokens that a draft row of this request reads.
        rate: estimated probability, in (0, 1), that its next draft is accepted.
        max_draft: most drafts it may hold now (output and context limits included); 0: none.
        verifies: verifies it has had, plain steps among them.
        age: steps since its last verify.
        slot: a number that it keeps while it runs; used to spread requests over phases.
        survival: estimated probability that all its pending drafts are accepted; None to take
            ``rate ** pending``.
    """

    committed: int
    pending: int
    draft_kv: int
    rate: float
    max_draft: int
    verifies: int = 0
    age: int = 0
    slot: int = 0
    survival: float | None = None


class Policy(Protocol):
    """Decides, for every running request, between drafting and verifying."""

    name: ClassVar[str]

    def decide(self, rows: Sequence[RowState], cost: CostModel) -> list[bool]:
        """One answer per row, in order: True to verify, False to draft."""
        ...


def check_at_least_one(value: int, name: str) -> None:
    """Raise ValueError unless ``value >= 1``."""
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")
