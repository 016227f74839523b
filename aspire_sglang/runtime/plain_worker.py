"""What a worker does for phases of plain steps: answers, forwards, books."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from sglang.srt.managers.utils import GenerationBatchResult

from aspire_sglang.runtime.cost import RunningCost
from aspire_sglang.runtime.modes import ModeScheduler, Running
from aspire_sglang.runtime.plain_steps import PlainSteps, count_plain_verifies
from aspire_sglang.runtime.rank_check import RankCheck
from aspire_sglang.runtime.ranks import Ranks
from aspire_sglang.runtime.spec_inputs import NextStepInput
from aspire_sglang.runtime.telemetry import Telemetry
from aspire_sglang.speculation.cost_model import StepShape


class PlainPhases(ABC):
    """Part of a worker; see :mod:`aspire_sglang.runtime.plain_steps`."""

    modes: ModeScheduler
    cost: RunningCost
    telemetry: Telemetry
    ranks: Ranks
    rank_check: RankCheck | None
    plain: PlainSteps | None
    target_worker: Any

    @abstractmethod
    def running(self, batch: Any) -> Running:
        """The requests of a batch as the online scheduler sees them."""

    def plain_steps(self, batch: Any) -> tuple[int, Running]:
        """For how many steps nobody will draft, 0 if somebody does or holds drafts."""
        running = self.running(batch)
        return self.modes.plain_steps(*running), running

    def resumed_input(self, batch: Any, relay: Any) -> NextStepInput | None:
        """What a batch carries that speculates again after a phase."""
        return NextStepInput(bonus_tokens=relay.output_tokens_buf[batch.req_pool_indices])

    def share_tokens(self, relay: Any) -> None:
        """The scheduler made its relay of tokens between steps, an ``AspireFutureMap``."""
        self.relay = relay

    def _plain_forward(self, batch: Any) -> GenerationBatchResult:
        if self.rank_check is not None:
            self.rank_check.compare_plain(batch, tuple(self.cost.model.coefficients))
        result = self.target_worker.forward_batch_generation(batch)
        if not batch.sampling_info.is_all_greedy:
            # SGLang's sampler draws on every rank from a generator of its own.
            result.next_token_ids = self.ranks.first(result.next_token_ids)
        return result

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
        if self.plain is not None:
            self.plain.finished(rid)
