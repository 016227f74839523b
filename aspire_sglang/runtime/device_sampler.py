"""New drafts and accepted runs from the logits of a mixed step, without waiting for the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from aspire_sglang.attention.step_buffers import HostStep, StepView
from aspire_sglang.kernels.greedy_accept import accept_greedy
from aspire_sglang.runtime.device_state import DeviceState
from aspire_sglang.sampling.drafting import sample_draft
from aspire_sglang.sampling.mixed import verify
from aspire_sglang.sampling.processors import (
    GREEDY_TEMPERATURE,
    TOP_K_ALL,
    SamplingRows,
    target_probs,
)


@dataclass(frozen=True)
class DeviceAccepted:
    """Outcome of the verify rows of a step, in the order of the step.

    ``tokens``: ``[n, G + 1]`` int64, accepted drafts, one token of the target, zeros.
    ``accept_lens``: ``[n]`` int32, tokens to commit.
    """

    tokens: Tensor
    accept_lens: Tensor


class DeviceSampler:
    """Greedy batches are decided by one kernel, others by rejection sampling in PyTorch."""

    def __init__(self, state: DeviceState) -> None:
        self._state = state

    def step(
        self,
        step: HostStep,
        view: StepView,
        logits: Tensor,
        sampling_info: Any,
        params: Sequence[Any],
    ) -> DeviceAccepted:
        """Extend the drafts of draft rows and judge the drafts of verify rows.

        Moves ``DeviceState`` and, for verify rows, ``view.row_lens``.

        Args:
            logits: ``[T, V]`` rows of the step's query tokens, without padding.
            sampling_info: SGLang's ``SamplingBatchInfo``, in batch order.
            params: SGLang's ``SamplingParams`` of each request, in batch order.
        """
        if sampling_info.is_all_greedy:
            return self._greedy(step, view, logits)
        return self._sampled(step, view, logits, device_rows(sampling_info, params))

    def _greedy(self, step: HostStep, view: StepView, logits: Tensor) -> DeviceAccepted:
        state, count = self._state, len(step.order)
        tokens = torch.empty((count, state.gamma_max + 1), dtype=torch.int64, device=logits.device)
        accept_lens = torch.empty(count, dtype=torch.int32, device=logits.device)
        accept_greedy(
            logits.argmax(dim=-1),
            view.cu_seqlens_q[: count + 1],
            view.slots[:count],
            1 - view.draft[:count],
            state.drafts,
            state.pending,
            state.bonus,
            view.row_lens[:count],
            tokens,
            accept_lens,
        )
        return DeviceAccepted(tokens[step.num_drafts :], accept_lens[step.num_drafts :])

    def _sampled(
        self, step: HostStep, view: StepView, logits: Tensor, rows: SamplingRows
    ) -> DeviceAccepted:
        state, count, drafts = self._state, len(step.order), step.num_drafts
        order, slots = view.order[:count].long(), view.slots[:count].long()
        pending = view.pending[:count].long()
        if drafts:
            drawn = sample_draft(target_probs(logits[:drafts], rows.take(order[:drafts])))
            slot, column = slots[:drafts], pending[:drafts]
            state.drafts[slot, column] = drawn.tokens
            state.token_probs[slot, column] = drawn.token_probs
            state.stored[slot * state.gamma_max + column] = drawn.stored
        if drafts == count:
            none = state.drafts.new_zeros((0, state.gamma_max + 1))
            return DeviceAccepted(none, none.new_zeros(0, dtype=torch.int32))
        slot = slots[drafts:]
        outcome = verify(
            logits[drafts:],
            rows.take(order[drafts:]),
            state.drafts[slot],
            pending[drafts:],
            view.cu_seqlens_q[drafts : count + 1].long() - drafts,
            state.draft_probs(slot),
        )
        last = (outcome.accept_len - 1).view(-1, 1)
        state.bonus[slot] = outcome.tokens.gather(1, last).view(-1)
        view.row_lens[drafts:count] += outcome.accept_len
        return DeviceAccepted(outcome.tokens, outcome.accept_len.int())


def device_rows(sampling_info: Any, params: Sequence[Any]) -> SamplingRows:
    """Sampling parameters of a batch: values on the device, flags from the host's copies.

    Args:
        sampling_info, params: as in :meth:`DeviceSampler.step`.
    """
    temperature = sampling_info.temperatures.view(-1)
    top_k = sampling_info.top_ks.view(-1).long()
    # SGLang keeps a temperature of 0 as a top-k of 1.
    sampled = [p for p in params if p.top_k > 1]
    return SamplingRows(
        temperature=temperature,
        top_k=top_k,
        top_p=sampling_info.top_ps.view(-1),
        min_p=sampling_info.min_ps.view(-1),
        greedy=(temperature < GREEDY_TEMPERATURE) | (top_k == 1),
        has_greedy=len(sampled) < len(params),
        has_sampled=True,
        has_rank_filter=any(p.top_k < TOP_K_ALL or p.top_p < 1.0 for p in sampled),
        has_min_p=any(p.min_p > 0.0 for p in sampled),
    )
