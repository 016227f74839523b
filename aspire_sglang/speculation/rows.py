"""What a policy is: it sees the running requests and says who verifies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from aspire_sglang.speculation.cost_model import CostModel

PLAIN_RUN = 7
"""Verifies for which a decision against drafts holds: a plain step is too short to ask at each."""

PLAIN_PHASE = 64
"""Steps for which it holds where nobody of the batch drafts and nobody joins."""


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
        length: its draft length by the feedback rule, see ``ablations.adjusted_length``.
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
    length: int = 1


class Policy(Protocol):
    """Decides, for every running request, between drafting and verifying.

    Attributes:
        name: as the configuration spells it.
        plans: a run's length follows from the state at its start, so :meth:`plan` may be asked then
            instead of :meth:`decide` at every step.
        plain_steps: for how many steps it holds that nobody of a batch drafts, where the policy
            does not plan; such steps are too short to ask at each.
    """

    name: ClassVar[str]
    plans: ClassVar[bool]
    plain_steps: ClassVar[int]

    def decide(self, rows: Sequence[RowState], cost: CostModel) -> list[bool]:
        """One answer per row, in order: True to verify, False to draft."""
        ...

    def plan(
        self,
        rows: Sequence[RowState],
        cost: CostModel,
        batch: int,
        together: bool,
        plain_ratio: float = 1.0,
        probe: bool | None = None,
    ) -> list[int]:
        """Drafts of the coming run of some rows, in a batch of ``batch`` rows.

        What :meth:`decide` would do step by step where nothing is learnt of pending drafts.

        Args:
            together: several requests of the batch are in their first draft.
            plain_ratio: what a step takes in which nobody drafts, of what ``cost`` predicts.
            probe: where no row drafts, whether all probe now, instead of each by its own count.

        Raises:
            NotImplementedError: the policy does not plan.
        """
        ...

    def until_probe(self, verifies: int) -> int:
        """Verifies for which a plan of no drafts holds, for a row that has had ``verifies``."""
        ...


class StepwisePolicy:
    """The part of a policy that has to be asked at every step."""

    __slots__ = ()
    plans: ClassVar[bool] = False
    plain_steps: ClassVar[int] = 1 + PLAIN_RUN

    def plan(
        self,
        rows: Sequence[RowState],
        cost: CostModel,
        batch: int,
        together: bool,
        plain_ratio: float = 1.0,
        probe: bool | None = None,
    ) -> list[int]:
        """See :class:`Policy`."""
        raise NotImplementedError(f"{type(self).__name__} decides step by step")

    def until_probe(self, verifies: int) -> int:
        """See :class:`Policy`."""
        return 0


def check_at_least_one(value: int, name: str) -> None:
    """Raise ValueError unless ``value >= 1``."""
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")
