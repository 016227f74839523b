"""Several steps for one round of SGLang's scheduler.

The scheduler's own work for a round takes as long as several short steps of the device. So more
steps are launched before it sees the result of the first: modes depend on numbers of drafts, which
the host knows without waiting, and on lengths, which it knows up to what verifies may commit.
"""

from __future__ import annotations

import logging
import time
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


def longest_burst(most_drafts: int) -> int:
    """Most steps of a burst where a request may hold so many drafts.

    Each moves a request's positions on by one at most, and a burst is launched while the one before
    may still run. The slots that are kept in reserve, twice the most queries of a row, must hold
    the steps of both behind a full run of drafts.
    """
    return min(BURST_STEPS, (2 * (most_drafts + 1) - most_drafts) // 2)


def next_of_burst(
    worker: Any, running: Running, burst: list[Launched], ended: set[int]
) -> tuple[Running, HostStep, list[int]] | None:
    """Another step to launch before SGLang sees the result of those before, None for none.

    Args:
        worker: the ``GpuWorker``.
        running: what the last step was decided on.
        burst: the steps launched so far.
        ended: batch rows that may have got their last token in this burst; those of its last step
            are added. They sit out the rest.

    Returns:
        (the running requests as they may be, what was decided on, KV tokens of a draft row each).
    """
    feedback, host = burst[-1].feedback, burst[-1].staged.host
    if worker.mixed_graphs is None or not feedback.graph:
        return None
    if len(burst) >= longest_burst(worker.speculative_num_steps):
        return None
    model = worker.cost.model
    if sum(model.predict(step.feedback.shape) for step in burst) >= BURST_SECONDS:
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

    Attributes:
        committed: tokens of the results that came since the last round.

    Args:
        worker: the ``GpuWorker``.
    """

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._last = 0.0
        self.committed = 0

    def round(self, running: Running, settled: bool) -> None:
        """A burst is about to be launched.

        With overlap scheduling the tokens since the last one are those of the burst before it; over
        many rounds that makes no difference.

        Args:
            settled: nothing but steps in which somebody drafts ran since the last round.
        """
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        tokens, self.committed = self.committed, 0
        worker, rows = self._worker, len(running.slots)
        check = worker.modes.clock_check
        if not settled or check is None or check.rest or not worker.may_decode_plainly(rows):
            return
        # All ranks ask or none.
        seconds = worker.ranks.first_number(seconds)
        predicted = worker.cost.model.predict(running.plain_shape())
        check.observe(tokens, seconds, rows, worker.cost.plain_speed.seconds(rows, predicted))
        if check.rest:
            logger.info(
                "ASPIRE: by the clock drafting is slower than plain decoding here; "
                "%d plain steps follow",
                check.rest,
            )
