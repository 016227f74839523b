"""Several steps for one round of SGLang's scheduler.

The scheduler's own work for a round takes as long as several short steps of the device. So more
steps are launched before it sees the result of the first: modes depend on numbers of drafts, which
the host knows without waiting, and on lengths, which it knows up to what verifies may commit.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Any

import torch

from aspire_sglang.attention.step_buffers import HostStep
from aspire_sglang.runtime.gpu_graphs import tier_of
from aspire_sglang.runtime.gpu_step import Launched
from aspire_sglang.runtime.modes import Running

logger = logging.getLogger(__name__)

BURST_SECONDS = 9e-3
"""A burst ends when the device has work for so long, by the cost model: that hides a round."""

BURST_STEPS = 4
"""Most steps of a burst: tokens and new requests wait for its end."""

STALL = 10.0
"""A burst that seems to take so many times what the device takes tells of something else: a pause
of the server, an update of the weights."""


def longest_burst(most_drafts: int) -> int:
    """Most steps of a burst where a request may hold so many drafts.

    Each moves a request's positions on by one at most, and a burst is launched while the one before
    may still run. The slots that are kept in reserve, twice the most queries of a row, must hold
    the steps of both behind a full run of drafts.
    """
    return min(BURST_STEPS, (2 * (most_drafts + 1) - most_drafts) // 2)


@dataclass
class Burst:
    """Steps that are launched for one round.

    Attributes:
        rows: requests of the batch.
        plain_seconds: what a plain step of them takes, as far as is known.
        stretch: number of the stretch of bursts, with nothing else in between, that it belongs to.
        settled: requests that began to draft together have verified since.
        steps: launched so far.
        predicted: their time on the device, in seconds.
        tokens: committed by those whose results came.
        reported: how many those are.
    """

    rows: int
    plain_seconds: float
    stretch: int
    settled: bool
    steps: int = 0
    predicted: float = 0.0
    tokens: int = 0
    reported: int = 0


def next_of_burst(
    worker: Any, running: Running, burst: Burst, last: Launched, ended: set[int]
) -> tuple[Running, HostStep, list[int]] | None:
    """Another step to launch before SGLang sees the result of those before, None for none.

    Args:
        worker: the ``GpuWorker``.
        running: what the last step was decided on.
        burst: the steps launched so far.
        last: the last of them.
        ended: batch rows that may have got their last token in this burst; those of its last step
            are added. They sit out the rest.

    Returns:
        (the running requests as they may be, what was decided on, KV tokens of a draft row each).
    """
    feedback, host = last.feedback, last.staged.host
    if worker.mixed_graphs is None or not feedback.graph:
        return None
    if burst.steps >= longest_burst(worker.speculative_num_steps):
        return None
    if burst.predicted >= BURST_SECONDS:
        return None
    if len(feedback.verified) == len(host.order):
        # Nobody drafts, so perhaps a phase of plain steps begins.
        return None
    slots, seq_lens, states, caps = running
    seq_lens, caps = seq_lens[:], caps[:]
    for row, (state, req, drafts) in zip(host.verify_rows, feedback.verified, strict=True):
        seq_lens[row] += drafts + 1
        caps[row] = worker.cap(req, state, seq_lens[row])
        if worker.may_have_ended(req, state):
            ended.add(row)
    after = Running(slots, seq_lens, states, caps)
    verify, draft_kv = worker.modes.decide(*after)
    step = worker.host_step(after, verify, list(ended))
    graphs = worker.model_runner.decode_cuda_graph_runner
    fits = tier_of(graphs, len(step.order), step.num_tokens)
    return (after, step, draft_kv) if fits else None


def lengths_after(launched: Launched, seq_lens: torch.Tensor) -> torch.Tensor:
    """``[bs]`` tokens with final KV after a step, in batch order.

    Args:
        seq_lens: ``[bs]`` int64 before it.
    """
    view, count = launched.staged.view, len(launched.staged.host.order)
    lengths = seq_lens.clone()
    lengths[view.order[:count].long()] = view.row_lens[:count]
    return lengths


class BurstClock:
    """Tells the online scheduler what drafting commits per second of the clock.

    The time of a burst is that between its result and the one before, which is known to be its own
    only where nothing else was launched in between.

    Args:
        worker: the ``GpuWorker``.
    """

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._stretch = 0
        self._since_plain = 0
        self._last = -1, 0.0

    def interrupt(self, plain: bool) -> None:
        """Something else is launched: plain steps, or a prefill."""
        self._stretch += 1
        if plain:
            self._since_plain = 0

    def begin(self, running: Running) -> Burst:
        """A burst is about to be launched."""
        worker, rows = self._worker, len(running.slots)
        predicted = worker.cost.model.predict(running.plain_shape())
        plain = worker.cost.plain_speed.seconds(rows, predicted)
        # Behind plain steps nobody holds drafts, so the first verifies of all come late.
        settled = self._since_plain >= 2 * worker.speculative_num_draft_tokens
        return Burst(rows, plain, self._stretch, settled)

    def launched(self, burst: Burst, predicted: float) -> None:
        """A step of the burst was launched that takes the device so many seconds."""
        self._since_plain += 1
        burst.steps += 1
        burst.predicted += predicted

    def reported(self, burst: Burst, tokens: int) -> None:
        """The result of one of its steps came; the last one ends the burst."""
        burst.tokens += tokens
        burst.reported += 1
        if burst.reported < burst.steps:
            return
        now = time.perf_counter()
        (stretch, before), self._last = self._last, (burst.stretch, now)
        worker = self._worker
        check = worker.modes.clock_check
        if stretch != burst.stretch or not burst.settled or check is None or check.rest:
            return
        if not worker.may_decode_plainly(burst.rows):
            return
        # All ranks ask or none.
        seconds = worker.ranks.first_number(now - before)
        if not 0.0 < seconds <= STALL * burst.predicted:
            return
        check.observe(burst.tokens, seconds, burst.steps, burst.rows, burst.plain_seconds)
        if check.rest:
            logger.info(
                "ASPIRE: by the clock drafting is slower than plain decoding here; "
                "%d plain steps follow",
                check.rest,
            )
