"""PyTorch stand-ins for Triton kernels and compiled functions on SGLang's scheduling path, for the
CPU platform."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from aspire_sglang.sampling.penalties import scaled

logger = logging.getLogger(__name__)


def support_triton(backend: str) -> bool:
    """There is no Triton driver here, whatever the attention backend."""
    return False


def assign_req_to_token_pool(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    batch_size: int,
) -> None:
    """Write freshly allocated slots into the rows of ``req_to_token``.

    Args:
        req_pool_indices: ``[bs]`` rows to write.
        req_to_token: ``[rows, width]`` int32 table, changed in place.
        start_offset, end_offset: ``[bs]`` first and past-the-end position per row.
        out_cache_loc: ``[sum(end - start)]`` slots, row after row.
    """
    taken = 0
    for row, start, end in zip(
        req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True
    ):
        count = end - start
        req_to_token[row, start:end] = out_cache_loc[taken : taken + count].to(req_to_token.dtype)
        taken += count


def apply_scaling_penalties(logits: torch.Tensor, scaling_penalties: torch.Tensor) -> None:
    """Repetition penalties, in place; both ``[bs, V]``."""
    logits.copy_(scaled(logits, scaling_penalties))


def allocate_token_bitmask(vocab_size: int, batch_size: int) -> torch.Tensor:
    """``[batch_size, ceil(vocab_size / 32)]`` int32 masks that allow every token."""
    return torch.full((batch_size, (vocab_size + 31) // 32), -1, dtype=torch.int32)


def checkpoint_dtype(original: Callable[..., torch.dtype], config: Any, dtype: Any) -> torch.dtype:
    """AROUND ``_get_and_verify_dtype``: what ``--dtype auto`` means on a CPU.

    SGLang serves float32 checkpoints in float16, as is usual on GPUs. Processors without matrix
    products in a 16-bit type compute them five to nine times slower than float32, so there
    ``auto`` gives float32; a type that is asked for by name is honoured.
    """
    chosen = original(config, dtype)
    if chosen == torch.float32 or _computes(chosen):
        return chosen
    name = str(chosen).removeprefix("torch.")
    if isinstance(dtype, str) and dtype.lower() == "auto":
        logger.info("--dtype auto is float32 here: this CPU computes %s slowly", name)
        return torch.float32
    logger.warning("--dtype %s: this CPU computes it slowly; float32 is faster", name)
    return chosen


def _computes(dtype: torch.dtype) -> bool:
    """Whether oneDNN has fast matrix products in a 16-bit type on this processor."""
    ops = torch.ops.mkldnn
    if dtype == torch.bfloat16:
        return bool(ops._is_mkldnn_bf16_supported())
    # Its float16 products exist on more processors than packed ones, which decode steps need.
    return False
