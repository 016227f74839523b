"""Attention of rows with one query token each, over lists of slots: draft and plain rows.

Two PyTorch operators read KV rows by index without copying them: the sampled product of a
sparse pattern (``torch.sparse.sampled_addmm``) gives the scores of chosen (query, slot) pairs,
and ``embedding_bag`` with per-sample weights sums chosen value rows. Both are memory-bound,
spread over threads by (row, head) and take any slots, so scattered lists cost the same as
contiguous ones. They read a KV row once per query head of its group; for large groups, and for
bfloat16 (the sampled product is float32 only), keys and values are gathered once instead and
multiplied in batches.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from aspire_sglang.attention.cpu_runs import Geometry

#: Largest group (query heads per KV head) for which reading by index beats gathering.
MAX_INDEXED_GROUP = 4
#: Keys per chunk: the query heads of a group visit a chunk in turn while it is in the cache.
CHUNK = 1024
#: Rows share a padded group while padding adds at most this share.
MAX_PADDING = 0.125


def _create_first_pattern() -> None:
    """Create a sparse tensor where PyTorch's once-only notice of their beta state is silenced."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        torch.sparse_csr_tensor([0, 1], [0], [1.0], (1, 1), check_invariants=False)


_create_first_pattern()


@dataclass(frozen=True)
class RowGroup:
    """Rows of similar length, padded to ``chunks * width`` keys.

    Attributes:
        rows: int64 ``[n]``, indices of the rows among the plan's rows.
        lens: int64 ``[n]`` their lengths.
        chunks, width: keys of a row are cut into ``chunks`` ranges of ``width``.
        padding: bool ``[n, 1, c, 1, width]`` marks padded keys of the last ``c`` chunks, or None.
        first: index of the group's first value in the plan's flat arrays.
    """

    rows: Tensor
    lens: Tensor
    chunks: int
    width: int
    padding: Tensor | None
    first: int


@dataclass(frozen=True)
class SinglePlan:
    """Index arrays for one-query rows; built once per forward, used by every layer.

    Attributes:
        geometry: heads and pool size.
        rows: number of rows.
        groups: rows by similar length.
        indexed: read KV by index (float32, small groups) instead of gathering.
        columns: flat pool row of every value: ``[values]`` int32 or int64. Values are ordered
            (row, kv head, chunk, head in group, key) when indexed, (row, kv head, key) when not.
        offsets: first value of every bag, closed by the total: ``[bags + 1]`` (indexed only).
        queries: int64 ``[bags]`` row of ``q.view(rows * Hq, D)`` of every bag (indexed only).
    """

    geometry: Geometry
    rows: int
    groups: tuple[RowGroup, ...]
    indexed: bool
    columns: Tensor
    offsets: Tensor
    queries: Tensor


def plan_single(
    slots: Tensor | Sequence[Tensor],
    lens: Tensor | Sequence[int],
    geometry: Geometry,
    dtype: torch.dtype = torch.float32,
    page_size: int = 16,
) -> SinglePlan:
    """Plan rows of one query token.

    Args:
        slots: int64 ``[n, L]`` padded (padding is never read), or ``n`` tensors ``[len_i]``.
        lens: length of every row, each at least 1.
        geometry: heads and pool size.
        dtype: dtype of the pool.
        page_size: chunks are cut at multiples of it.

    Raises:
        ValueError: a row is empty.
    """
    lengths = [int(x) for x in lens]
    if min(lengths, default=1) < 1:
        raise ValueError("a row without any slot to attend to")
    indexed = dtype == torch.float32 and geometry.group <= MAX_INDEXED_GROUP
    index_type = torch.int32
    if not indexed or geometry.num_kv_heads * geometry.num_slots >= 2**31:
        index_type = torch.int64
    groups: list[RowGroup] = []
    columns: list[Tensor] = []
    widths: list[tuple[int, int]] = []
    queries: list[Tensor] = []
    first = 0
    heads, group = geometry.num_kv_heads, geometry.group
    copies = group if indexed else 1
    for members in _by_length(lengths):
        longest = lengths[members[-1]]
        chunks = -(-longest // CHUNK) if indexed else 1
        width = -(-longest // chunks)
        width = -(-width // page_size) * page_size
        padded = chunks * width
        own = torch.tensor([lengths[i] for i in members])
        table = _padded(slots, members, lengths, padded)
        rows = torch.tensor(members)
        shape = (len(members), heads, chunks, copies, width)
        flat = table.view(len(members), 1, chunks, 1, width) + geometry.head_offsets().view(
            heads, 1, 1, 1
        )
        columns.append(flat.to(index_type).expand(shape).reshape(-1))
        bags = rows.view(-1, 1, 1, 1) * geometry.num_heads
        bags = bags + torch.arange(geometry.num_heads).view(heads, 1, group)
        queries.append(bags.expand(len(members), heads, chunks, group).reshape(-1))
        widths.append((len(members) * heads * chunks * group, width))
        groups.append(RowGroup(rows, own, chunks, width, _padding(own, chunks, width), first))
        first += columns[-1].numel()
    per_bag = [torch.full((count,), width) for count, width in widths]
    offsets = torch.zeros(sum(count for count, _ in widths) + 1, dtype=torch.int64)
    if per_bag:
        torch.cumsum(torch.cat(per_bag), 0, out=offsets[1:])
    return SinglePlan(
        geometry,
        len(lengths),
        tuple(groups),
        indexed,
        torch.cat(columns) if columns else torch.empty(0, dtype=index_type),
        offsets.to(index_type),
        torch.cat(queries) if queries else torch.empty(0, dtype=torch.int64),
    )


def attend_single(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: SinglePlan,
    scale: float,
    logit_cap: float = 0.0,
    want_probs: bool = False,
) -> tuple[Tensor, list[Tensor]]:
    """Attention of one-query rows over their planned slots.

    Args:
        q: ``[n, Hq, D]``.
        k, v: ``[Hkv, num_slots, D]`` contiguous pool of one layer, the dtype of ``q``.
        plan: from :func:`plan_single`.
        scale: factor of the scores.
        logit_cap: ``c`` of ``c * tanh(score / c)``; 0 for none.
        want_probs: also return the probabilities.

    Returns:
        ``[n, Hq, D]`` in the dtype of ``q``, and, if wanted, for every group of ``plan.groups``
        its float32 probabilities ``[rows, Hkv, chunks, group, width]`` (0 at padded keys).
    """
    if q.shape[0] != plan.rows:
        raise ValueError(f"{q.shape[0]} query rows for a plan of {plan.rows}")
    if plan.rows == 0:
        return torch.empty_like(q), []
    if plan.indexed:
        return _attend_indexed(q, k, v, plan, scale, logit_cap, want_probs)
    return _attend_gathered(q, k, v, plan, scale, logit_cap, want_probs)


def _attend_indexed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: SinglePlan,
    scale: float,
    logit_cap: float,
    want_probs: bool,
) -> tuple[Tensor, list[Tensor]]:
    heads, num_slots, dim = k.shape
    group = plan.geometry.group
    folded = q.reshape(-1, dim).index_select(0, plan.queries)
    values = torch.zeros(plan.columns.numel(), dtype=torch.float32)
    pattern = torch.sparse_csr_tensor(
        plan.offsets,
        plan.columns,
        values,
        (plan.queries.numel(), heads * num_slots),
        check_invariants=False,
    )
    torch.sparse.sampled_addmm(
        pattern, folded, k.view(-1, dim).t(), beta=0.0, alpha=scale, out=pattern
    )
    scores = pattern.values()
    sums: list[Tensor] = []
    probs: list[Tensor] = []
    for rows in plan.groups:
        shape = (rows.rows.numel(), heads, rows.chunks, group, rows.width)
        part = scores[rows.first : rows.first + _volume(shape)].view(shape)
        _shape_scores(part, rows, logit_cap)
        part.sub_(part.amax((2, 4), keepdim=True)).exp_()
        sums.append(part.sum((2, 4)))
        probs.append(part)
    bags = torch.embedding_bag(
        v.view(-1, dim), plan.columns, plan.offsets, False, 0, False, scores, True
    )[0]
    out = torch.empty_like(q)
    first = 0
    for rows, total in zip(plan.groups, sums, strict=True):
        count = rows.rows.numel()
        size = count * heads * rows.chunks * group
        part = bags[first : first + size].view(count, heads, rows.chunks, group, dim)
        merged = part.sum(2) if rows.chunks > 1 else part.squeeze(2)
        out[rows.rows] = merged.div_(total.unsqueeze(-1)).view(count, -1, dim)
        first += size
    if not want_probs:
        return out, []
    return out, [
        p.div_(total.view(*total.shape[:2], 1, group, 1))
        for p, total in zip(probs, sums, strict=True)
    ]


def _attend_gathered(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: SinglePlan,
    scale: float,
    logit_cap: float,
    want_probs: bool,
) -> tuple[Tensor, list[Tensor]]:
    heads, _, dim = k.shape
    group = plan.geometry.group
    out = torch.empty_like(q)
    probs: list[Tensor] = []
    for rows in plan.groups:
        count = rows.rows.numel()
        size = count * heads * rows.width
        columns = plan.columns[rows.first : rows.first + size]
        x = q[rows.rows].view(count * heads, group, dim).float() * scale
        keys = k.view(-1, dim).index_select(0, columns).view(-1, rows.width, dim)
        scores = torch.bmm(x, keys.float().transpose(1, 2))
        shaped = scores.view(count, heads, 1, group, rows.width)
        _shape_scores(shaped, rows, logit_cap)
        part = torch.softmax(scores, dim=-1)
        values = v.view(-1, dim).index_select(0, columns).view(-1, rows.width, dim)
        out[rows.rows] = torch.bmm(part.to(values.dtype), values).view(count, -1, dim)
        if want_probs:
            probs.append(part.view(shaped.shape))
    return out, probs


def _shape_scores(scores: Tensor, rows: RowGroup, logit_cap: float) -> None:
    """Cap the scores and mask padded keys, in place."""
    if logit_cap:
        scores.div_(logit_cap).tanh_().mul_(logit_cap)
    if rows.padding is not None:
        tail = rows.chunks - rows.padding.shape[2]
        scores[:, :, tail:].masked_fill_(rows.padding, float("-inf"))


def _by_length(lengths: Sequence[int]) -> list[list[int]]:
    """Group row indices by similar length, shortest first; the last of a group is its longest."""
    groups: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        if groups and lengths[index] <= lengths[groups[-1][0]] * (1 + MAX_PADDING):
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups


def _padded(
    slots: Tensor | Sequence[Tensor], members: list[int], lengths: Sequence[int], width: int
) -> Tensor:
    """Slots ``[len(members), width]``; a row is padded with its own first slot."""
    table = torch.empty(len(members), width, dtype=torch.int64)
    for row, member in enumerate(members):
        length = lengths[member]
        table[row, :length] = slots[member][:length]
        table[row, length:] = table[row, 0]
    return table


def _padding(lens: Tensor, chunks: int, width: int) -> Tensor | None:
    """Mask of padded keys in the chunks that have any."""
    shortest = int(lens.min())
    if shortest == chunks * width:
        return None
    tail = shortest // width
    keys = torch.arange(tail * width, chunks * width).view(1, 1, -1, 1, width)
    return keys >= lens.view(-1, 1, 1, 1, 1)


def _volume(shape: tuple[int, ...]) -> int:
    return shape[0] * shape[1] * shape[2] * shape[3] * shape[4]
