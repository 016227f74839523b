"""What is known of a mixed step on the GPU between its launch and its result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from aspire_sglang.attention.step_buffers import HostStep, StepView
from aspire_sglang.runtime.batching import step_shape
from aspire_sglang.runtime.device_sampler import DeviceAccepted
from aspire_sglang.runtime.draft_state import SlotState
from aspire_sglang.runtime.gpu_graphs import TierLayout
from aspire_sglang.runtime.modes import Running
from aspire_sglang.runtime.results import Verified
from aspire_sglang.speculation.cost_model import StepShape

# Steps take a few milliseconds and learning from one a fifth of one.
OBSERVED_SHARE = 0.1


@dataclass(frozen=True)
class Staged:
    """A step whose rows and tokens are on the device.

    ``layout``: the graph tier it was padded to, None for an eager step.
    """

    host: HostStep
    view: StepView
    layout: TierLayout | None


@dataclass(frozen=True)
class Feedback:
    """What to learn from a step once its accept lengths are known.

    ``burst``: that the step belongs to. ``verified``: per verify row its state, request and drafts.
    ``started`` and ``ended``: events around the step on the device. ``typical``: mixed steps went
    before.
    """

    worker: Any
    burst: Any
    shape: StepShape
    num_drafts: int
    verified: list[tuple[SlotState, Any, int]]
    started: Any
    ended: Any
    graph: bool
    typical: bool

    def __call__(self, accept_lens: list[int], counted: list[bool]) -> None:
        """Feed estimators, cost model and counters; the step has ended.

        Args:
            accept_lens: tokens that each verify row committed.
            counted: whether its request had not ended in an earlier step of the same result.
        """
        worker = self.worker
        for (state, req, drafts), length, counts in zip(
            self.verified, accept_lens, counted, strict=True
        ):
            state.settle(drafts, length - 1)
            # With overlap a request may have ended in the step before, unknown at launch.
            if counts and not req.finished():
                worker.telemetry.verified(req.rid, drafts, length - 1)
        worker.clock.reported(self.burst, sum(accept_lens))
        seconds = self.started.elapsed_time(self.ended) / 1e3
        if self.typical:
            agree = worker.ranks.first_number
            worker.cost.observe(self.shape, seconds, share=OBSERVED_SHARE, agree=agree)
        worker.telemetry.step(
            drafts=self.num_drafts,
            verifies=len(self.verified),
            tokens=self.shape.tokens,
            seconds=seconds,
            graph=self.graph,
        )


@dataclass(frozen=True)
class Launched:
    """A step on its way through the device.

    ``outcome``: of its verify rows. ``logits_output``: SGLang's, for its result.
    """

    staged: Staged
    outcome: DeviceAccepted
    logits_output: Any
    feedback: Feedback


@dataclass(frozen=True)
class Joined:
    """The outcome of consecutive steps that are handed to SGLang as one result.

    ``tokens``, ``accept_lens`` and ``drafts`` hold the verify rows of one step after the other's.

    ``parts``: which those are, and what to do with their accept lengths.
    """

    tokens: torch.Tensor
    accept_lens: torch.Tensor
    drafts: torch.Tensor
    parts: list[Verified]

    @classmethod
    def of(cls, steps: list[Launched]) -> Joined:
        hosts = [step.staged.host for step in steps]
        drafts = [torch.from_numpy(h.pending[h.order[h.num_drafts :]]) for h in hosts]
        outcomes = [step.outcome for step in steps]
        tokens, lens = [o.tokens for o in outcomes], [o.accept_lens for o in outcomes]
        parts = [Verified(step.staged.host.verify_rows, step.feedback) for step in steps]
        return cls(
            tokens[0] if len(steps) == 1 else torch.cat(tokens),
            lens[0] if len(steps) == 1 else torch.cat(lens),
            drafts[0] if len(steps) == 1 else torch.cat(drafts),
            parts,
        )


def shape_of(running: Running, step: HostStep, draft_kv: Sequence[int]) -> StepShape:
    """What a step costs."""
    order = step.order
    return step_shape(
        np.asarray(running.seq_lens)[order],
        step.pending[order],
        np.arange(len(order)) >= step.num_drafts,
        np.asarray(draft_kv)[order],
    )
