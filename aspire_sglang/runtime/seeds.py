"""Seeded requests on the CPU platform: the noise of a token depends on (seed, position) alone.

SGLang ignores ``sampling_seed`` unless the whole server runs with ``--enable-deterministic-
inference``, whose sampler is a Triton kernel. Here a request that carries a seed is always sampled
with that kernel's noise (:mod:`aspire_sglang.sampling.coupling`), by plain decoding, by prefill and
by speculation alike; requests without a seed are sampled as before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from aspire_sglang.sampling.coupling import draw_coupled
from aspire_sglang.sampling.processors import SamplingRows, filter_probs

SEEDS = "aspire_seeds"
"""Attribute of a ``SamplingBatchInfo`` during one forward: per request its seed or None."""

MIN_SEED, MAX_SEED = -(2**63), 2**63 - 1


def check_seed(seed: Any) -> None:
    """Refuse seeds that end the scheduler or would be cut.

    Raises:
        ValueError: not an integer of 64 bits.
    """
    if seed is None or (type(seed) is int and MIN_SEED <= seed <= MAX_SEED):
        return
    raise ValueError(f"sampling_seed must be an integer of 64 bits, not {seed!r}.")


def seeds_of(reqs: Sequence[Any]) -> list[int | None]:
    """Per request its seed; None without one, and for greedy requests, whose text needs none."""
    params = [req.sampling_params for req in reqs]
    return [None if p.top_k == 1 else p.sampling_seed for p in params]


def carry_seeds(
    original: Callable[..., Any], worker: Any, batch: Any, *args: Any, **kwargs: Any
) -> Any:
    """AROUND ``TpModelWorker.forward_batch_generation``: show the sampler the requests' seeds."""
    if batch is not None and batch.sampling_info is not None:
        setattr(batch.sampling_info, SEEDS, seeds_of(batch.reqs))
    return original(worker, batch, *args, **kwargs)


def sample_seeded(
    original: Callable[..., Tensor],
    sampler: Any,
    probs: Tensor,
    sampling_info: Any,
    positions: Tensor,
    simple_sampling_case: bool,
) -> Tensor:
    """AROUND ``Sampler._sample_from_probs``: draw the tokens of seeded requests from their noise.

    Args:
        probs: ``[bs, V]`` float32 after temperature and softmax.
        positions: ``[bs]`` position of the token whose logits were computed.

    Returns:
        ``[bs]`` int32 tokens.
    """
    tokens = original(sampler, probs, sampling_info, positions, simple_sampling_case)
    seeds = getattr(sampling_info, SEEDS, None)
    if seeds is None or len(seeds) != probs.shape[0] or sampling_info.sampling_seed is not None:
        return tokens
    at = [row for row, seed in enumerate(seeds) if seed is not None]
    if not at:
        return tokens
    index = torch.tensor(at, device=probs.device)
    rows = SamplingRows.of_batch(sampling_info, probs.device).take(index)
    seed = torch.tensor([seeds[row] for row in at], dtype=torch.int64, device=probs.device)
    drawn = draw_coupled(filter_probs(probs[index], rows), seed, positions[index])
    tokens[index] = drawn.to(tokens.dtype)
    return tokens
