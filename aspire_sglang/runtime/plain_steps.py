"""Phases in which nobody drafts, run by SGLang's own code for decoding without speculation.

While no request of a batch drafts or holds drafts, the batch itself is marked as not speculating:
preparation, forward, sampling and the processing of results are then SGLang's, and cost what they
cost there. What has to be translated are the ends of a phase:

* A step of plain decoding counts the token whose KV it writes before the forward, a speculating one
  counts after it. So lengths are taken over as they are at both ends, and one is added per step.
* Speculation keeps slots in reserve; a plain step takes its slot from there.
* With overlap scheduling the step before a phase is still running when the phase begins. Its
  lengths are read on the device; the host knows them up to one verify.

A phase is decided on as a whole and ends early when a request joins the batch, as SGLang then
merges a prefill into it, or when many have left.

A phase has one of two reasons: the online scheduler lets nobody draft, or a request asks for
something that only plain steps give (:mod:`aspire_sglang.runtime.plain_requests`). Then it lasts
until no such request is left, and pending drafts are dropped when it begins: no step that
speculates ever holds such a request.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from aspire_sglang.runtime.draft_state import SlotState
from aspire_sglang.runtime.reserve import reserve_plain_slots
from aspire_sglang.speculation.cost_model import StepShape

PLAIN_PHASE = "aspire_plain_phase"
"""Attribute of a ``GenerationBatchResult``: the phase that its step belongs to."""

_ON_POOL = "aspire_plain_steps"

# A phase of a batch that shrank to this share is decided on anew.
_SHRUNK = 0.75

# Fewer intervals say little about the time of a step.
_LEAST_INTERVALS = 6


def plain_steps_of(pool: Any) -> PlainSteps | None:
    """The phases of the scheduler that owns this request pool; None if it has none."""
    return getattr(pool, _ON_POOL, None)


def prepare_for_decode(original: Callable[[Any], None], batch: Any) -> None:
    """AROUND ``ScheduleBatch.prepare_for_decode``: SGLang's own, or a step of a phase."""
    plain = plain_steps_of(batch.req_to_token_pool)
    if plain is None:
        return original(batch)
    return plain.prepare(original, batch)


@dataclass
class Phase:
    """Consecutive plain steps of one batch.

    Attributes:
        owner: whose phase it is.
        batch: SGLang's ``ScheduleBatch``.
        members: request and state of everyone still in it, by request id.
        left: steps still decided on.
        shape: the cost of its first step.
        asking: ids of the requests that need plain steps; empty if the online scheduler decided.
        launched, processed: its steps so far, and those whose results SGLang has seen.
        booked: processed steps that are in the requests' counters.
        closed: no further step will be launched.
        intervals: seconds from one launch to the next.
    """

    owner: PlainSteps
    batch: Any
    members: dict[str, tuple[Any, SlotState]]
    left: int
    shape: StepShape
    asking: frozenset[str] = frozenset()
    launched: int = 0
    processed: int = 0
    booked: int = 0
    closed: bool = False
    intervals: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._first_size = self._size = len(self.batch.reqs)
        self._tail = self.batch.reqs[-1]
        self._last_launch = 0.0
        self._book = self.owner.worker.book_plain

    def goes_on(self, batch: Any) -> bool:
        """Whether the next step of ``batch`` belongs to the phase."""
        if self.left <= 0 or batch is not self.batch:
            return False
        reqs = batch.reqs
        if len(reqs) == self._size and reqs[-1] is self._tail:
            return True
        # Those who leave keep the order of the others, those who join come last.
        joined = reqs[-1].rid not in self.members or len(reqs) > self._size
        if joined or len(reqs) < _SHRUNK * self._first_size:
            return False
        stayed = {req.rid for req in reqs}
        if self.asking and not self.asking & stayed:
            return False
        self._size, self._tail = len(reqs), reqs[-1]
        for rid in [rid for rid in self.members if rid not in stayed]:
            self.leave(rid)
        return True

    def launch(self) -> None:
        """Count a step and the time since the one before."""
        now = time.perf_counter()
        if self.launched:
            self.intervals.append(now - self._last_launch)
        self._last_launch = now
        self.launched += 1
        self.left -= 1

    def leave(self, rid: str) -> None:
        """A request finished or was retracted: book its steps."""
        member = self.members.pop(rid, None)
        if member is not None:
            self._book(member[0], self.processed - self.booked)

    def close(self) -> None:
        """Tell every request's state and counters of the steps launched so far."""
        self.closed = True
        running = self.launched - self.processed
        for req, state in self.members.values():
            state.plain(self.launched, running)
            if not req.finished():
                self._book(req, self.processed - self.booked)
        self.booked = self.processed

    def settle(self) -> None:
        """The result of a step was processed after the phase had closed."""
        self.booked = self.processed
        for req, state in self.members.values():
            state.unsettled -= 1
            if not (req.finished() or req.is_retracted):
                self._book(req, 1)

    def seconds(self) -> float | None:
        """Time of a step, None if there were too few, or if requests may have slowed them down."""
        if self.asking or len(self.intervals) < _LEAST_INTERVALS:
            return None
        return median(self.intervals)


def count_plain_verifies(req: Any, steps: int) -> None:
    """A plain step is a verify of no drafts in SGLang's counters of a request."""
    if not steps:
        return
    req.spec_verify_ct += steps
    for histogram in (req.spec_correct_drafts_histogram, req.spec_cap_lens_histogram):
        if not histogram:
            histogram.append(0)
        histogram[0] += steps


class PlainSteps:
    """Begins and ends phases.

    Args:
        worker: the ``AspireWorker`` that is asked whether anybody drafts.
        pool: SGLang's request pool, by which :func:`prepare_for_decode` finds this object.
        most_unsettled: most tokens that one verify commits.
    """

    def __init__(self, worker: Any, pool: Any, most_unsettled: int) -> None:
        from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

        self.worker = worker
        self._ahead = most_unsettled + 1
        self._none = SpeculativeAlgorithm.NONE
        self._algorithm: Any = None
        self._relay: Any = None
        self._phase: Phase | None = None
        self._processing: Phase | None = None
        setattr(pool, _ON_POOL, self)

    def attach(self, relay: Any) -> None:
        """``relay``: the scheduler's ``AspireFutureMap``."""
        self._relay = relay
        self.worker.share_tokens(relay)

    def prepare(self, original: Callable[[Any], None], batch: Any) -> None:
        """Prepare the next decode step of a batch."""
        phase = self._phase
        if phase is not None and not phase.goes_on(batch):
            self._close(phase)
            phase = None
        if phase is None:
            plan = self.worker.plan_plain(batch)
            if not plan.steps:
                if batch.spec_algorithm.is_none():
                    batch.spec_algorithm = self._algorithm
                    batch.spec_info = self.worker.resumed_input(batch, self._relay)
                return original(batch)
            pairs = zip(batch.reqs, plan.running.states, strict=True)
            members = {req.rid: (req, state) for req, state in pairs}
            shape = plan.running.plain_shape()
            phase = Phase(self, batch, members, plan.steps, shape, plan.asking)
            self._phase = phase
        self._prepare_step(batch, phase)
        return None

    def _prepare_step(self, batch: Any, phase: Phase) -> None:
        from sglang.srt.model_executor.forward_batch_info import ForwardMode

        ahead = 1
        if not batch.spec_algorithm.is_none():
            ahead = self._ahead
            self._enter(batch)
        batch.forward_mode = ForwardMode.DECODE
        batch.input_embeds = None
        if batch.sampling_info.penalizer_orchestrator.is_required:
            batch.cumulate_penalty_output_tokens()
        reserve_plain_slots(batch, ahead)
        table = batch.req_to_token_pool.req_to_token
        batch.out_cache_loc = table[batch.req_pool_indices, batch.seq_lens].long()
        # New tensors: the old ones belong to the step that is running.
        batch.seq_lens = batch.seq_lens + 1
        if batch.seq_lens_cpu is not None:
            batch.seq_lens_cpu = batch.seq_lens_cpu + 1
        batch.seq_lens_sum = None
        phase.launch()

    def _enter(self, batch: Any) -> None:
        self._algorithm = batch.spec_algorithm
        info, relay = batch.spec_info, self._relay
        if info is not None:
            if info.future_indices is None and info.bonus_tokens is not None:
                # Without overlap scheduling the tokens travel on the batch.
                relay.output_tokens_buf[batch.req_pool_indices] = info.bonus_tokens.long()
            relay.resolve_seq_lens_cpu(batch)
        batch.spec_info = None
        batch.spec_algorithm = self._none

    def _close(self, phase: Phase) -> None:
        phase.close()
        self._phase = None
        self.worker.note_plain_phase(phase.launched, phase.shape, phase.seconds())

    def interrupt(self) -> None:
        """Decide anew before the next step: the settings changed."""
        if self._phase is not None:
            self._phase.left = 0

    def forward(self, batch: Any, run: Callable[[Any], Any]) -> Any:
        """Run a prepared step; ``run``: the target worker's whole step."""
        batch.input_ids = self._relay.output_tokens_buf[batch.req_pool_indices]
        self._relay.skips_publish = batch.enable_overlap
        result = run(batch)
        setattr(result, PLAIN_PHASE, self._phase)
        return result

    def process(
        self, phase: Phase, batch: Any, result: Any, original: Callable[[Any, Any], None]
    ) -> None:
        """Let SGLang process the result of one step of ``phase``."""
        rows = len(batch.reqs)
        phase.processed += 1
        self._processing = phase
        try:
            original(batch, result)
        finally:
            self._processing = None
        if phase.closed:
            phase.settle()
        self.worker.telemetry.step(
            drafts=0,
            verifies=rows,
            tokens=rows,
            seconds=phase.intervals[-1] if phase.intervals else 0.0,
            graph=result.can_run_cuda_graph,
            plain=True,
            for_parameters=bool(phase.asking),
        )

    def finished(self, rid: str) -> None:
        """SGLang found a request finished while it processed a result."""
        if self._processing is not None:
            self._processing.leave(rid)
