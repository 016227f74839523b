"""Attention of rows with several query tokens: verify runs and prefill chunks.

The keys before a row's own tokens are visible to all of its queries, so they need no mask and can
be taken in any pieces: each piece is read in place, by oneDNN products or by PyTorch's flash
kernel, and gives its log-sum-exp, by which the pieces are merged. The query heads of a group are
folded into the queries of one KV head, which reads the keys once; for the flash kernel a long
piece is split over a batch dimension to occupy all threads. The row's own tokens, with what is
left of the prefix if they are few, are one small masked piece.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from aspire_sglang.attention.cpu_products import attend_products, matmul_t, products_pay
from aspire_sglang.attention.cpu_runs import Geometry, Piece, gather, read_piece, split_runs

#: Up to this many query tokens, own tokens are folded and masked together with leftover keys;
#: more of them make a causal square of their own.
MAX_FOLDED_TOKENS = 64
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
        own: a piece that ends with the query tokens' own positions, or None.
        mask: float32 ``[tokens * group, own.length]`` to add to the scores of ``own``; None where
            ``own`` is nothing but the own tokens, causal among themselves.
    """

    context: int
    tokens: int
    prefix: tuple[Piece, ...]
    own: Piece | None
    mask: Tensor | None


def flash_available() -> bool:
    """Whether this PyTorch has the CPU flash kernel that returns a log-sum-exp."""
    return hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu")


def plan_row(slots: Tensor, tokens: int, geometry: Geometry) -> RowPlan:
    """Plan a row whose queries are its last ``tokens`` positions.

    Args:
        slots: int64 ``[L]``, ``L >= tokens``.
        tokens: query tokens, at least 1.
        geometry: heads and pool size.
    """
    context = slots.numel()
    before = context if tokens == 1 else context - tokens
    prefix, rest = split_runs(slots[:before])
    own_positions = torch.arange(before, context)
    if 1 < tokens <= MAX_FOLDED_TOKENS:
        own = gather(slots, torch.cat([rest, own_positions]), geometry)
        hidden = torch.full((tokens, tokens), float("-inf")).triu_(1)
        mask = torch.nn.functional.pad(hidden, (rest.numel(), 0))
        mask = mask.repeat_interleave(geometry.group, dim=0)
        return RowPlan(context, tokens, tuple(prefix), own, mask)
    if rest.numel():
        prefix.append(gather(slots, rest, geometry))
    if tokens == 1:
        return RowPlan(context, tokens, tuple(prefix), None, None)
    if bool((torch.diff(slots[before:]) == 1).all()):
        own = Piece(tokens, slice(before, context), slot=int(slots[before]))
    else:
        own = gather(slots, own_positions, geometry)
    return RowPlan(context, tokens, tuple(prefix), own, None)


def attend_row(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: RowPlan,
    scale: float,
    logit_cap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Attention of one planned row.

    Args:
        q: ``[tokens, Hq, D]`` queries of the row.
        k, v: ``[Hkv, num_slots, D]`` contiguous pool of one layer, the dtype of ``q``.
        plan: from :func:`plan_row`.
        scale: factor of the scores.
        logit_cap: ``c`` of ``c * tanh(score / c)``; 0 for none.

    Returns:
        ``[tokens, Hq, D]`` in the dtype of ``q``, and the log-sum-exp of all scores, float32
        ``[Hkv, tokens * group]``.
    """
    tokens, num_heads, dim = q.shape
    kv_heads = k.shape[0]
    x = _fold(q, kv_heads)
    use_flash = not (logit_cap or products_pay(x.shape[1], q.dtype)) and flash_available()
    parts: list[tuple[Tensor, Tensor]] = []
    for piece in plan.prefix:
        keys, values = read_piece(k, piece), read_piece(v, piece)
        if use_flash:
            parts.append(_flash(x, keys, values, scale))
        else:
            parts.append(attend_products(x, keys, values, scale, logit_cap))
    if plan.own is not None:
        keys, values = read_piece(k, plan.own), read_piece(v, plan.own)
        if plan.mask is not None:
            part = _attend_masked(x, keys, values, scale, plan.mask, logit_cap)
        elif use_flash:
            part = _flash_causal(q, keys, values, scale)
        else:
            part = attend_products(x, keys, values, scale, logit_cap, causal_tokens=tokens)
        parts.append(part)
    out, lse = _merge(parts)
    out = out.view(kv_heads, tokens, num_heads // kv_heads, dim).transpose(0, 1)
    return out.reshape(q.shape).to(q.dtype), lse


def row_probs(
    q: Tensor,
    k: Tensor,
    plan: RowPlan,
    lse: Tensor,
    voters: Sequence[int],
    scale: float,
    logit_cap: float,
) -> Tensor:
    """Probabilities that some query tokens give to every position of the row.

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
        float32 ``[Hkv, len(voters), group, context]``.
    """
    tokens, num_heads = q.shape[:2]
    kv_heads = k.shape[0]
    group = num_heads // kv_heads
    chosen = torch.tensor(voters)
    x = _fold(q[chosen].float() * scale, kv_heads)
    total = lse.view(kv_heads, tokens, group)[:, chosen].reshape(kv_heads, -1, 1)
    probs = x.new_empty(kv_heads, len(voters), group, plan.context)
    for piece in plan.prefix if plan.own is None else (*plan.prefix, plan.own):
        keys = read_piece(k, piece)
        for head in range(kv_heads):
            scores = matmul_t(x[head], keys[head].float())
            if logit_cap:
                scores.div_(logit_cap).tanh_().mul_(logit_cap)
            values = scores.sub_(total[head]).exp_().view(len(voters), group, -1)
            probs[head][..., piece.positions] = values
    if tokens > 1:
        position = plan.context - tokens + chosen
        own = torch.arange(plan.context - tokens, plan.context)
        hidden = own > position.view(-1, 1, 1)
        probs[..., plan.context - tokens :].masked_fill_(hidden, 0.0)
    return probs


def _fold(q: Tensor, kv_heads: int) -> Tensor:
    """``[tokens, Hq, D]`` as ``[Hkv, tokens * group, D]``."""
    tokens, _, dim = q.shape
    return q.view(tokens, kv_heads, -1, dim).transpose(0, 1).reshape(kv_heads, -1, dim)


def _attend_masked(
    x: Tensor, keys: Tensor, values: Tensor, scale: float, mask: Tensor, logit_cap: float
) -> tuple[Tensor, Tensor]:
    """Attention over a few keys ``[Hkv, n, D]`` of which not all queries see all.

    Args:
        x: folded queries ``[Hkv, R, D]``.
        mask: float32 ``[R, n]`` to add to the scores.

    Returns:
        ``[1, Hkv, R, D]`` and the log-sum-exp, float32 ``[1, Hkv, R]``.
    """
    queries, columns = x.float(), keys.float().transpose(1, 2)
    if logit_cap:
        scores = torch.bmm(queries, columns)
        scores.mul_(scale / logit_cap).tanh_().mul_(logit_cap).add_(mask)
    else:
        scores = torch.baddbmm(mask, queries, columns, alpha=scale)
    probs = torch.softmax(scores, dim=-1)
    lse = scores.amax(-1).sub_(probs.amax(-1).log_())
    return torch.bmm(probs.to(values.dtype), values).unsqueeze(0), lse.unsqueeze(0)


def _flash(x: Tensor, keys: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Flash kernel over keys ``[Hkv, n, D]``, split into ``S`` shares to occupy the threads.

    Args:
        x: folded queries ``[Hkv, R, D]``.

    Returns:
        ``[S, Hkv, R, D]`` and the log-sum-exp of every share, float32 ``[S, Hkv, R]``.
    """
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
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(
        x.unsqueeze(0).expand(splits, -1, -1, -1),
        keys.view(shape).transpose(0, 1),
        values.view(shape).transpose(0, 1),
        scale=scale,
    )


def _flash_causal(q: Tensor, keys: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Flash kernel over a causal square: ``q`` ``[n, Hq, D]``, keys and values ``[Hkv, n, D]``.

    Returns:
        ``[1, Hkv, n * group, D]`` and float32 ``[1, Hkv, n * group]``.
    """
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
    folded = out.transpose(1, 2).reshape(1, heads, -1, dim)
    return folded, lse.transpose(1, 2).reshape(1, heads, -1)


def _merge(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Merge attention over disjoint keys by its log-sum-exp.

    Args:
        parts: outputs ``[S, Hkv, R, D]`` and log-sum-exps ``[S, Hkv, R]``.

    Returns:
        ``[Hkv, R, D]`` and the log-sum-exp of all scores ``[Hkv, R]``.
    """
    out, lse = _merge_splits(*parts[0])
    for part in parts[1:]:
        other, other_lse = _merge_splits(*part)
        # The share of the second part is a sigmoid of the difference.
        share = torch.sub(other_lse, lse).sigmoid_().unsqueeze(-1)
        out = torch.lerp(out, other, share.to(out.dtype))
        lse = torch.logaddexp(lse, other_lse)
    return out, lse


def _merge_splits(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merge the shares of one part: ``[S, Hkv, R, D]`` to ``[Hkv, R, D]``."""
    if lse.shape[0] == 1:
        return out[0], lse[0]
    weights = torch.softmax(lse, dim=0)
    # The largest share and its weight give the whole log-sum-exp.
    total = lse.amax(0).sub_(weights.amax(0).log_())
    return (out * weights.unsqueeze(-1)).sum(0), total
