"""Attention of prefill chunks: PyTorch's flash kernel over the prefix and over the chunk itself.

With many query tokens the flash kernel is as fast as separate products and holds no scores. Its
log-sum-exp lets the prefix (all visible, no mask) and the chunk's own causal square be computed
apart and merged, so a cached prefix is read in place and never recomputed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from aspire_sglang.attention.cpu_runs import (
    MIN_VIEW,
    Geometry,
    Piece,
    cover,
    find_runs,
    gathered,
    read_piece,
)

#: Query tokens from which the flash kernel is used.
MIN_TOKENS = 48


@dataclass(frozen=True)
class Chunk:
    """Many query tokens behind a prefix that all of them see.

    Attributes:
        slots: int64 ``[L]`` slots of the row.
        tokens: query tokens, the last positions of the row.
        prefix: pieces that cover the positions before them.
        own: the query tokens' own positions.
    """

    slots: Tensor
    tokens: int
    prefix: tuple[Piece, ...]
    own: Piece


def flash_available() -> bool:
    """Whether this PyTorch has the CPU flash kernel that returns a log-sum-exp."""
    return hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu")


def plan_chunk(slots: Tensor, tokens: int, geometry: Geometry) -> Chunk:
    """Plan a prefill chunk.

    Args:
        slots: int64 ``[L]`` slots of the row, ``L >= tokens``.
        tokens: query tokens of the row.
        geometry: heads and pool size.
    """
    before = slots.numel() - tokens
    runs = find_runs(slots, MIN_VIEW)
    prefix = cover(slots, runs, before, 0, geometry, index_tail=False).pieces
    if int(slots[-1] - slots[before]) == tokens - 1 and bool((slots[before:].diff() == 1).all()):
        own = Piece(tokens, int(slots[before]), before)
    else:
        own = gathered(slots, torch.arange(before, slots.numel()), geometry, causal=True)
    return Chunk(slots, tokens, prefix, own)


def attend_chunk(q: Tensor, k: Tensor, v: Tensor, chunk: Chunk, scale: float) -> Tensor:
    """Attention of one prefill chunk.

    Args:
        q: ``[tokens, Hq, D]`` queries of the chunk.
        k, v: ``[Hkv, num_slots, D]`` contiguous pool of one layer, the dtype of ``q``.
        chunk: the plan.
        scale: factor of the scores.

    Returns:
        ``[tokens, Hq, D]`` in the dtype of ``q``.
    """
    tokens, num_heads, dim = q.shape
    heads = k.shape[0]
    x = q.view(tokens, heads, num_heads // heads, dim).permute(1, 2, 0, 3)
    outs: list[Tensor] = []
    lses: list[Tensor] = []
    for piece in (chunk.own, *chunk.prefix):
        # KV heads are the batch; their query heads share keys and values through stride 0.
        keys = read_piece(k, piece).unsqueeze(1).expand(-1, x.shape[1], -1, -1)
        values = read_piece(v, piece).unsqueeze(1).expand(-1, x.shape[1], -1, -1)
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(
            x, keys, values, 0.0, piece is chunk.own, scale=scale
        )
        outs.append(out)
        lses.append(lse)
    if len(outs) == 1:
        merged = outs[0]
    else:
        weights = torch.softmax(torch.stack(lses), dim=0).unsqueeze(-1)
        merged = outs[0] * weights[0]
        for out, weight in zip(outs[1:], weights[1:], strict=True):
            merged.addcmul_(out, weight)
    return merged.permute(2, 0, 1, 3).reshape(q.shape).to(q.dtype)
