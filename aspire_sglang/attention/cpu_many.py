"""Attention of rows with several query tokens (verify runs, prefill chunks) over planned pieces.

Per KV head, the query heads of its group are folded into the rows of one matrix product, and
oneDNN's linear is called directly: on skinny float32 shapes it beats MKL's (batched) products.
Pieces are merged by their log-sum-exp, as in flash decoding.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from aspire_sglang.attention.cpu_runs import Block, Piece

_HAS_ONEDNN = torch.backends.mkldnn.is_available()


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


def attend_block(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block: Block,
    scale: float,
    logit_cap: float = 0.0,
    votes: Sequence[int] = (),
) -> tuple[Tensor, Tensor | None]:
    """Attention of one planned block of query tokens.

    Args:
        q: ``[tokens, Hq, D]`` queries of the block.
        k, v: ``[Hkv, num_slots, D]`` contiguous pool of one layer, the dtype of ``q``.
        block: the plan.
        scale: factor of the scores.
        logit_cap: ``c`` of ``c * tanh(score / c)``; 0 for none.
        votes: tokens of the block (0-based) whose probabilities are wanted.

    Returns:
        ``[tokens, Hq, D]`` in the dtype of ``q``, and float32 probabilities
        ``[Hkv, len(votes), group, visible]`` (None without votes).
    """
    tokens, num_heads, dim = q.shape
    heads = k.shape[0]
    group = num_heads // heads
    x = q.view(tokens, heads, group, dim).transpose(0, 1).reshape(heads, tokens * group, dim)
    x = x.float() * scale
    single = len(block.pieces) == 1
    outs: list[Tensor] = []
    lses: list[Tensor] = []
    voted: list[Tensor] = []
    for piece in block.pieces:
        out, lse, probs = _attend_piece(x, k, v, piece, tokens, logit_cap, votes, not single)
        outs.append(out)
        lses.append(lse)
        voted.append(probs)
    if single:
        merged, weights = outs[0], None
    else:
        weights = torch.softmax(torch.stack(lses), dim=0)
        merged = (torch.stack(outs) * weights.unsqueeze(-1)).sum(0)
    result = merged.view(heads, tokens, group, dim).transpose(0, 1).reshape(q.shape).to(q.dtype)
    if not votes:
        return result, None
    probs = x.new_empty(heads, len(votes), group, block.visible)
    for index, piece in enumerate(block.pieces):
        part = voted[index]
        if weights is not None:
            share = weights[index].view(heads, tokens, group, 1)[:, list(votes)]
            part = part * share
        if piece.positions is None:
            probs[..., piece.position : piece.position + piece.length] = part
        else:
            probs[..., piece.positions] = part
    return result, probs


def _attend_piece(
    x: Tensor,
    k: Tensor,
    v: Tensor,
    piece: Piece,
    tokens: int,
    logit_cap: float,
    votes: Sequence[int],
    want_lse: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Output ``[Hkv, R, D]``, log-sum-exp ``[Hkv, R]``, voted ``[Hkv, votes, group, length]``."""
    heads, rows, dim = x.shape
    keys, values = _read(k, piece), _read(v, piece)
    mask = None
    if piece.causal and tokens > 1:
        mask = _causal(tokens, rows // tokens)
    out = x.new_empty(heads, rows, dim)
    lse = x.new_empty(heads, rows)
    voted = x.new_empty(heads, len(votes), rows // tokens, piece.length)
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
        if votes:
            voted[head] = probs.view(tokens, -1, piece.length)[list(votes)]
        out[head] = matmul_t(probs.to(values.dtype), values[head].t())
    return out, lse, voted


def _read(pool: Tensor, piece: Piece) -> Tensor:
    """Keys or values of a piece, ``[Hkv, length, D]``, each head contiguous."""
    if piece.rows is None:
        return pool[:, piece.slot : piece.slot + piece.length]
    heads, _, dim = pool.shape
    return pool.view(-1, dim).index_select(0, piece.rows).view(heads, piece.length, dim)


def _causal(tokens: int, group: int) -> Tensor:
    """Additive mask ``[tokens * group, tokens]`` of a block's own tokens, rows folded by group."""
    mask = torch.full((tokens, tokens), float("-inf")).triu_(1)
    return mask.repeat_interleave(group, dim=0)
