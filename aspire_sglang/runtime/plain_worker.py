"""What a worker does for phases of plain steps: answers, forwards, books."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from sglang.srt.managers.utils import GenerationBatchResult

from aspire_sglang.runtime.cost import RunningCost
from aspire_sglang.runtime.draft_state import SlotState
from aspire_sglang.runtime.modes import ModeScheduler, PlainPlan, Running
from aspire_sglang.runtime.plain_requests import needs_plain_steps
from aspire_sglang.runtime.plain_steps import PlainSteps, count_plain_verifies
from aspire_sglang.runtime.rank_check import RankCheck
from aspire_sglang.runtime.ranks import Ranks
from aspire_sglang.runtime.spec_inputs import NextStepInput
from aspire_sglang.runtime.telemetry import Telemetry
from aspire_sglang.speculation.cost_model import StepShape
from aspire_sglang.speculation.rows import PLAIN_PHASE


class PlainPhases(ABC):
    """Part of a worker; see :mod:`aspire_sglang.runtime.plain_steps`.

    Attributes:
        plain_for_parameters: requests with some parameters are decoded plainly, see
            :mod:`aspire_sglang.runtime.plain_requests`.
    """

    plain_for_parameters = False

    modes: ModeScheduler
    cost: RunningCost
    telemetry: Telemetry
    ranks: Ranks
    rank_check: RankCheck | None
    plain: PlainSteps
    target_worker: Any

    @abstractmethod
    def running(self, batch: Any) -> Running:
        """The requests of a batch as the online scheduler sees them."""

    def plan_plain(self, batch: Any) -> PlainPlan:
        """Decide on the next steps of a batch. Where a request needs plain steps, pending drafts of
        the others are dropped: it cannot take part in the step that would verify them."""
        running = self.running(batch)
        asking = self._asking(batch.reqs, running.states)
        if asking and self.plain_for_parameters:
            self.telemetry.dropped(sum(state.drop() for state in running.states))
            return PlainPlan(PLAIN_PHASE, running, asking)
        # What speculative steps honour by code of ours stays with them.
        steps = 0 if asking else self._chosen_plain_steps(batch, running)
        return PlainPlan(steps, running)

    def _asking(self, reqs: list[Any], states: list[SlotState]) -> frozenset[str]:
        """Ids of the requests whose parameters a GPU honours by plain steps only."""
        found = []
        for req, state in zip(reqs, states, strict=True):
            if state.plain_only is None:
                state.plain_only = needs_plain_steps(req)
            if state.plain_only:
                found.append(req.rid)
        return frozenset(found)

    def _chosen_plain_steps(self, batch: Any, running: Running) -> int:
        """For how many steps the online scheduler lets nobody draft, 0 if somebody drafts or holds
        drafts."""
        return self.modes.plain_steps(*running)

    def resumed_input(self, batch: Any, relay: Any) -> NextStepInput | None:
        """What a batch carries that speculates again after a phase."""
        return NextStepInput(bonus_tokens=relay.output_tokens_buf[batch.req_pool_indices])

    def share_tokens(self, relay: Any) -> None:
        """The scheduler made its relay of tokens between steps, an ``AspireFutureMap``."""
        self.relay = relay

    def _plain_forward(self, batch: Any) -> GenerationBatchResult:
        if self.rank_check is not None:
            self.rank_check.compare_plain(batch, tuple(self.cost.model.coefficients))
        target = self.target_worker
        # With overlap scheduling SGLang samples a batch with grammars after it has processed the
        # step before, whose tokens move the grammars on; not so for a worker that speculates.
        speculates, target.enable_spec = target.enable_spec, False
        try:
            result = target.forward_batch_generation(batch)
        finally:
            target.enable_spec = speculates
        if not batch.sampling_info.is_all_greedy:
            self._agree_on_samples(result)
        return result

    def _agree_on_samples(self, result: GenerationBatchResult) -> None:
        """SGLang's sampler draws on every rank from a generator of its own."""
        sample = result.delay_sample_func
        if sample is None:
            result.next_token_ids = self.ranks.first(result.next_token_ids)
            return

        def agreed() -> GenerationBatchResult:
            sample()
            result.next_token_ids = self.ranks.first(result.next_token_ids)
            return result

        result.delay_sample_func = agreed

    def book_plain(self, req: Any, steps: int) -> None:
        """Count plain steps whose tokens a request has."""
        count_plain_verifies(req, steps)
        if steps:
            self.telemetry.plain(req.rid, steps)

    def note_plain_phase(self, steps: int, shape: StepShape, seconds: float | None) -> None:
        """A phase ended after ``steps`` steps, which took ``seconds`` each if that is known."""
        self.modes.plain_ran(steps)
        if seconds is not None:
            # Whether there is a time follows from the number of steps, so all ranks ask or none.
            seconds = self.ranks.first_number(seconds)
            predicted = self.cost.model.predict(shape)
            self.cost.plain_speed.observe(shape.tokens, predicted, seconds)

    def note_request_finished(self, rid: str, **_: Any) -> None:
        """SGLang found a request finished; called before it reports the request's counters."""
        self.plain.finished(rid)
