"""Attention of rows with several query tokens: verify runs and prefill chunks.

The keys before a row's own tokens are visible to all of its queries, so they need no mask and can
be taken in any pieces: PyTorch's flash kernel reads each piece in place and gives its
log-sum-exp, by which the pieces are merged. The query heads of a group are folded into the
queries of one KV head, which reads the keys once, and a long piece is split over a batch
dimension to occupy all threads. The row's own tokens are a small causal square of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from aspire_sglang.attention.cpu_products import attend_products, matmul_t
from aspire_sglang.attention.cpu_runs import Geometry, Piece, gather, read_piece, split_runs

#: Most products (tokens x query heads of one KV head x keys) for which the keys outside long runs
#: are read by index; beyond it they are gathered, which costs once per key.
MAX_INDEXED = 24_000
#: Fewest keys of a split piece.
MIN_SPLIT = 512
#: Query rows that the flash kernel gives to one thread at a time.
_FLASH_ROWS = 32


@dataclass(frozen=True)
class RowPlan:
    """How the keys of a row are read.

    Attributes:
        context: positions of the row.
        tokens: its query tokens, the last positions.
        prefix: pieces that every query token sees.
        own: the query tokens' own positions, to be masked causally, or None.
        tail: int64 positions to be read by index instead, ascending, or None. They end with the
            query tokens' own positions.
    """

    context: int
    tokens: int
    prefix: tuple[Piece, ...]
    own: Piece | None
    tail: Tensor | None


@dataclass(frozen=True)
class Part:
    """Attention over some of the keys.

    Attributes:
        out: ``[Hkv, tokens * group, D]``.
        lse: float32 ``[Hkv, tokens * group]``, log-sum-exp of the scores.
    """

    out: Tensor
    lse: Tensor


def flash_available() -> bool:
    """Whether this PyTorch has the CPU flash kernel that returns a log-sum-exp."""
    return hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu")


def plan_row(slots: Tensor, tokens: int, geometry: Geometry, index_tail: bool) -> RowPlan:
    """Plan a row whose queries are its last ``tokens`` positions.

    Args:
        slots: int64 ``[L]``, ``L >= tokens``.
        tokens: query tokens, at least 1.
        geometry: heads and pool size.
        index_tail: leave what is not read in place to be read by index, if that is cheap.
    """
    context = slots.numel()
    before = context if tokens == 1 else context - tokens
    prefix, rest = split_runs(slots[:before])
    own_positions = torch.arange(before, context)
    products = (rest.numel() + own_positions.numel()) * tokens * geometry.group
    if index_tail and products <= MAX_INDEXED:
        tail = torch.cat([rest, own_positions])
        return RowPlan(context, tokens, tuple(prefix), None, tail if tail.numel() else None)
    if rest.numel():
        prefix.append(gather(slots, rest, geometry))
    own = None
    if tokens > 1:
        own = gather(slots, own_positions, geometry)
        if bool((torch.diff(slots[before:]) == 1).all()):
            own = Piece(tokens, slice(before, context), slot=int(slots[before]))
    return RowPlan(context, tokens, tuple(prefix), own, None)


def fold(q: Tensor, kv_heads: int) -> Tensor:
    """``[tokens, Hq, D]`` as ``[Hkv, tokens * group, D]``."""
    tokens, _, dim = q.shape
    return q.view(tokens, kv_heads, -1, dim).transpose(0, 1).reshape(kv_heads, -1, dim)


def attend_row(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: RowPlan,
    scale: float,
    logit_cap: float = 0.0,
    tail: Part | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of one planned row.

    Args:
        q: ``[tokens, Hq, D]`` queries of the row.
        k, v: ``[Hkv, num_slots, D]`` contiguous pool of one layer, the dtype of ``q``.
        plan: from :func:`plan_row`.
        scale: factor of the scores.
        logit_cap: ``c`` of ``c * tanh(score / c)``; 0 for none.
        tail: the part over the keys that the plan leaves to be read by index.

    Returns:
        ``[tokens, Hq, D]`` in the dtype of ``q``, and the log-sum-exp of all scores, float32
        ``[Hkv, tokens * group]``.
    """
    kv_heads = k.shape[0]
    x = fold(q, kv_heads)
    parts = [] if tail is None else [tail]
    pieces = [(piece, False) for piece in plan.prefix]
    if plan.own is not None:
        pieces.append((plan.own, True))
    for piece, causal in pieces:
        keys, values = read_piece(k, piece), read_piece(v, piece)
        if logit_cap or not flash_available():
            tokens = plan.tokens if causal else 0
            part = Part(*attend_products(x, keys, values, scale, logit_cap, tokens))
        elif causal:
            part = _flash_causal(q, keys, values, scale)
        else:
            part = _flash(x, keys, values, scale)
        parts.append(part)
    merged = parts[0] if len(parts) == 1 else _merge(parts)
    tokens, num_heads, dim = q.shape
    out = merged.out.view(kv_heads, tokens, num_heads // kv_heads, dim).transpose(0, 1)
    return out.reshape(q.shape).to(q.dtype), merged.lse


def row_probs(
    q: Tensor,
    k: Tensor,
    plan: RowPlan,
    lse: Tensor,
    voters: Sequence[int],
    scale: float,
    logit_cap: float,
) -> Tensor:
    """Probabilities that some query tokens give to the keys of the row's pieces.

    A pass over the keys for the voters alone; the softmax is known from the attention.

    Args:
        q: ``[tokens, Hq, D]`` queries of the row.
        k: ``[Hkv, num_slots, D]`` contiguous keys of one layer.
        plan: from :func:`plan_row`.
        lse: float32 ``[Hkv, tokens * group]`` from :func:`attend_row`.
        voters: query tokens, counted from the row's first.
        scale: factor of the scores.
        logit_cap: as in :func:`attend_row`.

    Returns:
        float32 ``[len(voters), Hkv, group, context]``; 0 at the positions of the tail.
    """
    tokens, num_heads = q.shape[:2]
    kv_heads = k.shape[0]
    group = num_heads // kv_heads
    chosen = torch.tensor(voters)
    x = fold(q[chosen].float() * scale, kv_heads)
    total = lse.view(kv_heads, tokens, group)[:, chosen].reshape(kv_heads, -1, 1)
    probs = x.new_zeros(kv_heads, len(voters), group, plan.context)
    pieces = plan.prefix if plan.own is None else (*plan.prefix, plan.own)
    for piece in pieces:
        keys = read_piece(k, piece)
        for head in range(kv_heads):
            scores = matmul_t(x[head], keys[head].float())
            if logit_cap:
                scores.div_(logit_cap).tanh_().mul_(logit_cap)
            values = scores.sub_(total[head]).exp_().view(len(voters), group, -1)
            probs[head][..., piece.positions] = values
    if plan.own is not None:
        position = plan.context - plan.tokens + chosen
        hidden = torch.arange(plan.context) > position.unsqueeze(1)
        probs.masked_fill_(hidden.unsqueeze(1), 0.0)
    return probs.transpose(0, 1)


def _flash(x: Tensor, keys: Tensor, values: Tensor, scale: float) -> Part:
    """Flash kernel without a mask: ``x`` ``[Hkv, R, D]``, keys and values ``[Hkv, n, D]``."""
    heads, rows, dim = x.shape
    length = keys.shape[1]
    splits = 1
    items = heads * -(-rows // _FLASH_ROWS)
    while (
        items * splits < 4 * torch.get_num_threads()
        and length % (2 * splits) == 0
        and length // (2 * splits) >= MIN_SPLIT
    ):
        splits *= 2
    shape = (heads, splits, length // splits, dim)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(
        x.unsqueeze(0).expand(splits, -1, -1, -1),
        keys.view(shape).transpose(0, 1),
        values.view(shape).transpose(0, 1),
        scale=scale,
    )
    if splits == 1:
        return Part(out[0], lse[0])
    return _merge([Part(*split) for split in zip(out, lse, strict=True)])


def _flash_causal(q: Tensor, keys: Tensor, values: Tensor, scale: float) -> Part:
    """Flash kernel over a causal square: ``q`` ``[n, Hq, D]``, keys and values ``[Hkv, n, D]``."""
    tokens, num_heads, dim = q.shape
    heads = keys.shape[0]
    group = num_heads // heads
    # KV heads are the batch; their query heads share keys and values through stride 0.
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(
        q.view(tokens, heads, group, dim).permute(1, 2, 0, 3),
        keys.unsqueeze(1).expand(-1, group, -1, -1),
        values.unsqueeze(1).expand(-1, group, -1, -1),
        0.0,
        True,
        scale=scale,
    )
    return Part(out.transpose(1, 2).reshape(heads, -1, dim), lse.transpose(1, 2).reshape(heads, -1))


def _merge(parts: Sequence[Part]) -> Part:
    """Merge the softmaxes of disjoint keys."""
    lses = torch.stack([part.lse for part in parts])
    weights = torch.softmax(lses, dim=0).unsqueeze(-1)
    out = parts[0].out * weights[0]
    for part, weight in zip(parts[1:], weights[1:], strict=True):
        out.addcmul_(part.out, weight)
    return Part(out, torch.logsumexp(lses, dim=0))
