"""PyTorch stand-ins for Triton kernels and compiled functions on SGLang's scheduling path, for the
CPU platform."""

from __future__ import annotations

import torch

from aspire_sglang.sampling.penalties import scaled


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
