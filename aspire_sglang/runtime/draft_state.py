"""What the worker remembers about each request between steps: its pending drafts.

State is keyed by the request's slot in SGLang's request pool and by the slot's generation, so a
slot that changes hands starts afresh whatever happened to its last owner (finish, abort,
retraction, flush).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from aspire_sglang.speculation.ablations import adjusted_length
from aspire_sglang.speculation.acceptance import AcceptanceEstimator
from aspire_sglang.speculation.confidence import ConfidenceCalibration, RunJudge


@dataclass(slots=True)
class SlotState:
    """Host side of one request's speculation.

    ``pending``: drafts proposed since the last verify (``k``). ``verifies``: verify steps so far.
    ``age``: steps since the last verify. ``unsettled``: most tokens that verifies whose outcome
    is not known yet may commit. ``probs``: for a sampled request, per pending draft, its
    stored distribution ``[V]`` and the probability of the drawn token. ``confidence``: per pending
    draft, what its judge keeps of it. ``sampled``: which judge, see ``DraftState.judges``.
    ``run``: drafts decided on for this run, None before. ``rest``: verifies for which plain
    decoding is decided on. ``most``: of the GPU's worker, limits of the request that never change.
    ``length``: draft length by the feedback rule. ``plain_only``: whether the request's parameters
    need plain steps, None before they were looked at.
    """

    generation: int
    acceptance: AcceptanceEstimator
    pending: int = 0
    verifies: int = 0
    age: int = 0
    unsettled: int = 0
    run: int | None = None
    rest: int = 0
    most: tuple[int, int] | None = None
    length: int = 3
    probs: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    confidence: list[Any] = field(default_factory=list)
    sampled: bool = False
    plain_only: bool | None = None

    def drop(self) -> int:
        """Forget the pending drafts, as nobody will verify them.

        Returns:
            How many there were.
        """
        dropped, self.pending = self.pending, 0
        self.age = 0
        self.run = None
        self.probs.clear()
        self.confidence.clear()
        return dropped

    def begin_settling(self) -> None:
        """All pending drafts are being verified; the outcome is not known yet."""
        self.unsettled += self.pending + 1
        self.pending = 0
        self.verifies += 1
        self.age = 0
        self.run = None
        self.probs.clear()
        self.confidence.clear()

    def plain(self, steps: int, running: int) -> None:
        """``steps`` plain steps were launched, of which ``running`` have no result yet."""
        self.verifies += steps
        self.acceptance.decay(steps)
        self.unsettled += running
        self.age = self.rest = 0
        self.run = None

    def settle(self, drafts: int, accepted: int) -> None:
        """The outcome of a verify of ``drafts`` drafts, ``accepted`` of them accepted."""
        self.unsettled -= drafts + 1
        if drafts:
            self.acceptance.observe(drafts, accepted)
            self.length = adjusted_length(self.length, drafts, accepted)
        else:
            self.acceptance.decay()


class DraftState:
    """Pending drafts of all request slots.

    Attributes:
        tokens: ``[num_slots, gamma_max]`` int64, draft tokens; column ``j`` is draft ``j + 1``.
        judges: what is known of drafts is worth, over all greedy and over all sampled requests.
    """

    def __init__(
        self,
        num_slots: int,
        gamma_max: int,
        device: torch.device | str,
        make_acceptance: Callable[[], AcceptanceEstimator],
    ) -> None:
        self.tokens = torch.zeros((num_slots, gamma_max), dtype=torch.int64, device=device)
        self._make_acceptance = make_acceptance
        self.judges: dict[bool, RunJudge]
        self._slots: dict[int, SlotState] = {}
        self.use_judges(ConfidenceCalibration)

    def use_judges(self, make: Callable[[], RunJudge]) -> None:
        """Start to learn anew, with judges of another kind."""
        self.judges = {False: make(), True: make()}
        for state in self._slots.values():
            state.confidence.clear()

    def note(self, state: SlotState, sampled: bool, probability: float, gap: float) -> None:
        """Note what is known of the draft that is about to be added.

        Args:
            sampled: the request does not decode greedily.
            probability: the draft's probability of its token.
            gap: difference of the two highest log-probabilities of the draft.
        """
        state.sampled = sampled
        state.confidence.append(
            self.judges[sampled].token(probability, gap, state.pending, state.acceptance.rate)
        )

    def get(self, slot: int, generation: int) -> SlotState:
        """State of the slot's present owner; fresh if the slot changed hands."""
        state = self._slots.get(slot)
        if state is None or state.generation != generation:
            state = self.reset(slot, generation)
        return state

    def reset(self, slot: int, generation: int) -> SlotState:
        """Forget the slot's drafts: its KV was just rewritten by a prefill."""
        state = SlotState(generation, self._make_acceptance())
        self._slots[slot] = state
        return state

    def clear(self) -> None:
        """Forget everything: the KV pool was flushed."""
        self._slots.clear()

    def add_draft(self, slot: int, state: SlotState, token: int) -> None:
        """Append one draft token to the slot's pending run."""
        self.tokens[slot, state.pending] = token
        state.pending += 1
        state.age += 1

    def settle(self, state: SlotState, accepted: int) -> None:
        """Book a verify of all pending drafts, ``accepted`` of them accepted."""
        drafts = state.pending
        if drafts and len(state.confidence) == drafts:
            self.judges[state.sampled].observe(state.confidence, accepted)
        state.begin_settling()
        state.settle(drafts, accepted)

    def survival(self, state: SlotState) -> float | None:
        """Probability that all pending drafts are accepted; None if nothing is known of them."""
        if not state.confidence or len(state.confidence) != state.pending:
            return None
        return self.judges[state.sampled].survival(state.confidence, state.acceptance.rate)
