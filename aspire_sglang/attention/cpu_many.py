"""Attention of rows with several query tokens, such as verify runs.

Per KV head, the query heads of its group are folded into the rows of one matrix product, and
oneDNN's linear is called directly: on skinny float32 shapes it beats MKL's (batched) products.
Pieces are merged by their log-sum-exp, as in flash decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from aspire_sglang.attention.cpu_runs import (
    MIN_VIEW,
    SCORE_BUDGET,
    Cover,
    Geometry,
    Piece,
    cover,
    find_runs,
    read_piece,
)

#: Most query tokens of one block.
MAX_BLOCK_TOKENS = 128
_HAS_ONEDNN = torch.backends.mkldnn.is_available()


@dataclass(frozen=True)
class Block:
    """Query tokens ``start .. start + tokens`` of a row, and how what they see is read."""

    start: int
    tokens: int
    cover: Cover


@dataclass(frozen=True)
class Part:
    """Attention of a block's tokens over some of their keys.

    Attributes:
        out: float32 ``[Hkv, tokens * group, D]``.
        lse: float32 ``[Hkv, tokens * group]``, log-sum-exp of the scores.
        positions: int64 ``[n]`` positions of the keys, or a range.
        probs: float32 ``[Hkv, votes, group, n]`` probabilities of voting tokens among these keys.
    """

    out: Tensor
    lse: Tensor
    positions: Tensor | slice
    probs: Tensor | None


def plan_blocks(
    slots: Tensor, query_len: int, geometry: Geometry, index_tail: bool = False
) -> list[Block]:
    """Plan the attention of a row whose queries are its last ``query_len`` positions.

    Args:
        slots: int64 ``[L]`` slots of the row, ``L >= query_len``.
        query_len: query tokens of the row, at least 1.
        geometry: heads and pool size.
        index_tail: see :func:`cover`.

    Returns:
        Blocks that together cover the row's query tokens.
    """
    context = slots.numel()
    runs = find_runs(slots, MIN_VIEW)
    step = max(1, min(MAX_BLOCK_TOKENS, SCORE_BUDGET // (geometry.group * context)))
    blocks = []
    for start in range(0, query_len, step):
        tokens = min(step, query_len - start)
        visible = context - query_len + start + tokens
        part = cover(slots, runs, visible, tokens, geometry, index_tail)
        blocks.append(Block(start, tokens, part))
    return blocks


def matmul_t(x: Tensor, w: Tensor) -> Tensor:
    """``x @ w.T`` of two matrices, through oneDNN where the build has it.

    Args:
        x: ``[m, K]``, contiguous.
        w: ``[n, K]``, contiguous or the transpose of a contiguous matrix. Anything else is
            correct but makes oneDNN reorder it, which costs more than the product.

    Returns:
        ``[m, n]`` of the inputs' dtype.
    """
    if _HAS_ONEDNN:
        return torch.ops.mkldnn._linear_pointwise.default(x, w, None, "none", [], "")
    return torch.mm(x, w.t())


def fold(q: Tensor, kv_heads: int) -> Tensor:
    """``[tokens, Hq, D]`` as ``[Hkv, tokens * group, D]``."""
    tokens, _, dim = q.shape
    return q.view(tokens, kv_heads, -1, dim).transpose(0, 1).reshape(kv_heads, -1, dim)


def attend_block(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block: Block,
    scale: float,
    logit_cap: float = 0.0,
    votes: Sequence[int] = (),
    tail: Part | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Attention of one planned block of query tokens.

    Args:
        q: ``[tokens, Hq, D]`` queries of the block.
        k, v: ``[Hkv, num_slots, D]`` contiguous pool of one layer, the dtype of ``q``.
        block: the plan.
        scale: factor of the scores.
        logit_cap: ``c`` of ``c * tanh(score / c)``; 0 for none.
        votes: tokens of the block (0-based) whose probabilities are wanted.
        tail: the part over the keys that the plan leaves to be read by index.

    Returns:
        ``[tokens, Hq, D]`` in the dtype of ``q``, and float32 probabilities
        ``[Hkv, len(votes), group, visible]`` (None without votes).
    """
    tokens = q.shape[0]
    kv_heads, _, dim = k.shape
    group = q.shape[1] // kv_heads
    parts = [] if tail is None else [tail]
    alone = len(parts) + len(block.cover.pieces) == 1
    if block.cover.pieces:
        x = fold(q, kv_heads).float() * scale
        for piece in block.cover.pieces:
            parts.append(_attend_piece(x, k, v, piece, tokens, logit_cap, votes, not alone))
    if alone:
        merged, weights = parts[0].out, None
    else:
        weights = torch.softmax(torch.stack([part.lse for part in parts]), dim=0).unsqueeze(-1)
        merged = parts[0].out * weights[0]
        for part, weight in zip(parts[1:], weights[1:], strict=True):
            merged.addcmul_(part.out, weight)
    out = merged.view(kv_heads, tokens, group, dim).transpose(0, 1).reshape(q.shape).to(q.dtype)
    if not votes:
        return out, None
    probs = torch.empty(kv_heads, len(votes), group, block.cover.visible)
    for index, part in enumerate(parts):
        assert part.probs is not None
        if weights is None:
            probs[..., part.positions] = part.probs
        else:
            share = weights[index].view(kv_heads, tokens, group, 1)[:, list(votes)]
            probs[..., part.positions] = part.probs * share
    return out, probs


def _attend_piece(
    x: Tensor,
    k: Tensor,
    v: Tensor,
    piece: Piece,
    tokens: int,
    logit_cap: float,
    votes: Sequence[int],
    want_lse: bool,
) -> Part:
    """One piece; ``x`` holds the folded and scaled queries ``[Hkv, R, D]``."""
    heads, rows, _ = x.shape
    keys, values = read_piece(k, piece), read_piece(v, piece)
    mask = None
    if piece.causal and tokens > 1:
        mask = _causal(tokens, rows // tokens)
    out = torch.empty_like(x)
    lse = x.new_empty(heads, rows)
    voted = x.new_empty(heads, len(votes), rows // tokens, piece.length) if votes else None
    for head in range(heads):
        scores = matmul_t(x[head], keys[head].float())
        if logit_cap:
            scores.div_(logit_cap).tanh_().mul_(logit_cap)
        if mask is not None:
            scores[:, piece.length - tokens :].add_(mask)
        probs = torch.softmax(scores, dim=-1)
        if want_lse:
            # The largest score and its probability give the log-sum-exp without another exp.
            torch.sub(scores.amax(-1), probs.amax(-1).log_(), out=lse[head])
        if voted is not None:
            voted[head] = probs.view(tokens, -1, piece.length)[list(votes)]
        out[head] = matmul_t(probs.to(values.dtype), values[head].t())
    where = piece.positions
    if where is None:
        return Part(out, lse, slice(piece.position, piece.position + piece.length), voted)
    return Part(out, lse, where, voted)


def _causal(tokens: int, group: int) -> Tensor:
    """Additive mask ``[tokens * group, tokens]`` of a block's own tokens, rows folded by group."""
    mask = torch.full((tokens, tokens), float("-inf")).triu_(1)
    return mask.repeat_interleave(group, dim=0)
