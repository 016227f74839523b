"""Model operators with fewer, larger PyTorch calls than SGLang's reference versions.

A decode step on a CPU spends as long in the overhead of small operators as in matrix products, so
normalisation and rotary embedding, run twice per layer, are worth a version of their own. Cases
that the fast versions do not cover go to SGLang's.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
from sglang.srt.layers.utils.multi_platform import MultiPlatformOp


def rms_norm(
    op: Any,
    x: torch.Tensor,
    residual: torch.Tensor | None = None,
    post_residual_addition: torch.Tensor | None = None,
) -> Any:
    """``RMSNorm.forward_native`` in one operator.

    Args:
        x: ``[T, hidden]``. residual: ``[T, hidden]`` added to ``x`` first, and returned updated.
    """
    plain = (
        x.dtype == torch.float32
        and op.weight.dtype == torch.float32
        and post_residual_addition is None
        and op.variance_size_override is None
        and op.override_orig_dtype is None
    )
    if not plain:
        return op.forward_native(x, residual, post_residual_addition)
    if residual is None:
        return torch.rms_norm(x, (op.hidden_size,), op.weight, op.variance_epsilon)
    residual = x + residual
    normed = torch.rms_norm(residual, (op.hidden_size,), op.weight, op.variance_epsilon)
    return normed, residual


def rotary_embedding(
    op: Any,
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    offsets: torch.Tensor | None = None,
    fused_set_kv_buffer_arg: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``RotaryEmbedding.forward_native`` for whole heads in halves ("neox style").

    Args:
        positions: ``[T]`` int64. query: ``[T, Hq * D]``. key: ``[T, Hkv * D]``.
    """
    whole_heads = op.is_neox_style and op.rotary_dim == op.head_size
    if not whole_heads or offsets is not None or query.dtype != torch.float32:
        return op.forward_native(positions, query, key, offsets, fused_set_kv_buffer_arg)
    cos, sin = _factors(op, positions)
    if not _adjacent(query, key):
        return _rotate(query, cos, sin), _rotate(key, cos, sin)
    width = query.shape[1]
    both = query.as_strided((query.shape[0], width + key.shape[1]), query.stride())
    rotated = _rotate(both, cos, sin)
    return rotated[:, :width], rotated[:, width:]


def _adjacent(query: torch.Tensor, key: torch.Tensor) -> bool:
    """Whether both are neighbouring columns of one matrix, as a fused projection leaves them."""
    return (
        query.stride() == key.stride()
        and query.stride(1) == 1
        and query.untyped_storage().data_ptr() == key.untyped_storage().data_ptr()
        and key.storage_offset() == query.storage_offset() + query.shape[1]
    )


def _factors(op: Any, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``[T, 1, 1, D/2]`` cosines and ``[T, 1, 2, D/2]`` sines, signed for the two halves.

    All layers of a forward share the positions tensor, so the factors are made once. The version
    counter tells a tensor that was written again from one that was not.
    """
    known = getattr(op, "_aspire_factors", None)
    version = None if positions.is_inference() else positions._version
    if known is None or known[0] is not positions or version is None or known[1] != version:
        cos, sin = op.cos_sin_cache.index_select(0, positions.flatten()).chunk(2, dim=-1)
        signed = torch.stack((-sin, sin), dim=1).unsqueeze(1)
        known = (positions, version, cos[:, None, None, :].contiguous(), signed)
        op._aspire_factors = known
    return known[2], known[3]


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    halves = x.reshape(x.shape[0], -1, 2, cos.shape[-1])
    return (halves * cos).addcmul_(halves.flip(2), sin).view(x.shape)


def register_ops(platform_key: str) -> None:
    """Use these versions on the platform with this dispatch key."""
    MultiPlatformOp.register_oot_forward(RMSNorm, rms_norm, platform_key)
    MultiPlatformOp.register_oot_forward(RotaryEmbedding, rotary_embedding, platform_key)
