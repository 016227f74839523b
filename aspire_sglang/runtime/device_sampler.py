"""New drafts and accepted runs from the logits of a mixed step, without waiting for the device.

Drafts and target sample with the same noise at the same position of a request (see
:mod:`aspire_sglang.kernels.sample_tokens`), so a sampled draft is judged as a greedy one is: it is
accepted while it equals the target's own token. Nothing has to be remembered of the drafts'
distributions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from aspire_sglang.attention.step_buffers import HostStep, StepBuffers, StepView
from aspire_sglang.kernels.greedy_accept import accept_greedy
from aspire_sglang.kernels.sample_tokens import sample_tokens
from aspire_sglang.runtime.device_state import DeviceState
from aspire_sglang.runtime.ranks import Ranks
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


def choose_tokens(
    steps: StepBuffers, view: StepView, scores: Tensor, temperature: Tensor | None = None
) -> None:
    """Fill ``view.next_tokens``. May be captured.

    Args:
        steps: the buffers that ``view`` is part of.
        view: rows and token places of the step.
        scores: ``[T, V]`` logits of the first ``T`` token places.
        temperature: ``[R]`` float32 instead of the view's.
    """
    count = scores.shape[0]
    sample_tokens(
        scores,
        view.token_row[:count],
        view.positions[:count],
        view.temperature if temperature is None else temperature,
        view.key_low,
        view.key_high,
        steps.partial,
        view.next_tokens[:count],
    )


class DeviceSampler:
    """Chooses a token after every query token, then moves drafts and requests on.

    Every rank has gathered the same logits, and equal logits and noise give equal tokens. Only sums
    over the vocabulary, which filters need, may round differently from one call to the next: where
    there are filters, the first rank's tokens hold.
    """

    def __init__(self, state: DeviceState, steps: StepBuffers, ranks: Ranks | None = None) -> None:
        self._state = state
        self._steps = steps
        self._ranks = ranks or Ranks()

    def step(
        self,
        step: HostStep,
        view: StepView,
        logits: Tensor,
        sampling_info: Any,
        params: Sequence[Any],
        *,
        filtered: bool,
        chosen: bool,
    ) -> DeviceAccepted:
        """Extend the drafts of draft rows and judge the drafts of verify rows.

        Moves ``DeviceState`` and, for verify rows, ``view.row_lens``.

        Args:
            logits: ``[T, V]`` rows of the step's query tokens, without padding.
            sampling_info: SGLang's ``SamplingBatchInfo``, in batch order.
            params: SGLang's ``SamplingParams`` of each request, in batch order.
            filtered: some request keeps only part of the vocabulary, see :class:`RequestSampling`.
            chosen: :func:`choose_tokens` was part of the forward.
        """
        if filtered:
            self._choose_filtered(step, view, logits, device_rows(sampling_info, params))
            self._ranks.first(view.next_tokens[: step.num_tokens])
        elif not chosen:
            choose_tokens(self._steps, view, logits)
        return self._accept(step, view)

    def _choose_filtered(
        self, step: HostStep, view: StepView, logits: Tensor, rows: SamplingRows
    ) -> None:
        count = step.num_tokens
        owner = view.order[view.token_row[:count].long()].long()
        # The filters leave some tokens a probability of 0, which no noise can make up for.
        scores = target_probs(logits[:count], rows.take(owner)).log_()
        # Temperature is part of the probabilities already; 0 still marks the greedy rows.
        choose_tokens(self._steps, view, scores, view.temperature.sign())

    def _accept(self, step: HostStep, view: StepView) -> DeviceAccepted:
        state, count = self._state, len(step.order)
        device = view.next_tokens.device
        # Fresh memory: with overlap scheduling the host reads it while the next step runs.
        tokens = torch.empty((count, state.gamma_max + 1), dtype=torch.int64, device=device)
        accept_lens = torch.empty(count, dtype=torch.int32, device=device)
        accept_greedy(
            view.next_tokens[: step.num_tokens],
            view.cu_seqlens_q[: count + 1],
            view.slots[:count],
            view.draft[:count],
            state.drafts,
            state.pending,
            state.bonus,
            view.row_lens[:count],
            tokens,
            accept_lens,
        )
        return DeviceAccepted(tokens[step.num_drafts :], accept_lens[step.num_drafts :])


class RequestSampling:
    """What the host knows of the sampling of each request, by slot of the request pool.

    Attributes:
        temperature: ``[num_slots]`` float32, 0 where the request decodes greedily.
        filtered: ``[num_slots]`` bool, whether it samples from part of the vocabulary only.
        keys: ``[num_slots]`` uint64, names of the noise of its samples.

    Args:
        num_slots: request slots.
        seed: of the keys; tensor-parallel ranks must share it.
    """

    def __init__(self, num_slots: int, seed: int | None) -> None:
        self.temperature = np.zeros(num_slots, dtype=np.float32)
        self.filtered = np.zeros(num_slots, dtype=bool)
        self.keys = np.zeros(num_slots, dtype=np.uint64)
        self._random = np.random.default_rng(seed)

    def set(self, slot: int, params: Any) -> None:
        """A request with these ``SamplingParams`` starts in ``slot``."""
        self.temperature[slot] = 0.0 if _greedy(params) else params.temperature
        self.filtered[slot] = _filters(params)
        self.keys[slot] = self._random.integers(0, 1 << 64, dtype=np.uint64)


def device_rows(sampling_info: Any, params: Sequence[Any]) -> SamplingRows:
    """Sampling parameters of a batch: values on the device, flags from the host's copies.

    Args:
        sampling_info, params: as in :meth:`DeviceSampler.step`.
    """
    temperature = sampling_info.temperatures.view(-1)
    top_k = sampling_info.top_ks.view(-1).long()
    sampled = [p for p in params if not _greedy(p)]
    return SamplingRows(
        temperature=temperature,
        top_k=top_k,
        top_p=sampling_info.top_ps.view(-1),
        min_p=sampling_info.min_ps.view(-1),
        greedy=(temperature < GREEDY_TEMPERATURE) | (top_k == 1),
        has_greedy=len(sampled) < len(params),
        has_sampled=bool(sampled),
        has_rank_filter=any(p.top_k < TOP_K_ALL or p.top_p < 1.0 for p in sampled),
        has_min_p=any(p.min_p > 0.0 for p in sampled),
    )


def _greedy(params: Any) -> bool:
    # SGLang keeps a temperature of 0 as a top-k of 1.
    return params.top_k == 1 or params.temperature < GREEDY_TEMPERATURE


def _filters(params: Any) -> bool:
    if _greedy(params):
        return False
    return params.top_k < TOP_K_ALL or params.top_p < 1.0 or params.min_p > 0.0
