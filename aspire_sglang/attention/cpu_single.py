"""Attention of single query tokens over lists of slots: draft rows and plain rows.

Two PyTorch operators read KV rows by index without copying them: the sampled product of a
sparse pattern (``torch.sparse.sampled_addmm``) gives the scores of chosen (query, slot) pairs,
and ``embedding_bag`` with per-sample weights sums chosen value rows. Both are memory-bound,
spread over threads by (row, head) and take any slots, so scattered lists cost the same as
contiguous ones. They read a KV row once per query head of its group; for large groups, and for
bfloat16 (the sampled product is float32 only), keys and values are gathered once instead and
multiplied in batches.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from aspire_sglang.attention.cpu_runs import Geometry, check_slots

#: Largest group (query heads per KV head) for which reading by index beats gathering.
MAX_INDEXED_GROUP = 4
#: Fewest keys per chunk when the heads of a batch are too few to occupy the threads.
MIN_CHUNK = 512
#: Rows share a padded group while padding adds at most this share, or this many keys.
MAX_PADDING = 0.125
MAX_PADDED_KEYS = 16
#: Score of padded keys: finite, so that a chunk of nothing else has a (vanishing) log-sum-exp.
_MASKED = -1e30


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
        members: the same as numbers.
        chunks, width: keys of a row are cut into ``chunks`` ranges of ``width``.
        padding: bool ``[n, 1, c, 1, width]`` marks padded keys of the last ``c`` chunks, or None.
        scores, probs: float32 scratch ``[n, Hkv, chunks, group, width]`` (indexed only; empty
            else); every layer writes to it.
        all_in_order: the group is all of the plan's rows, in their order.
        first: index of the group's first value in the plan's flat arrays.
        bags: (row, KV head, chunk, head in group) combinations.
    """

    rows: Tensor
    members: list[int]
    chunks: int
    width: int
    padding: Tensor | None
    first: int
    bags: int
    scores: Tensor
    probs: Tensor
    all_in_order: bool


@dataclass(frozen=True)
class SinglePlan:
    """Index arrays for one-query rows; built once per forward, used by every layer.

    Attributes:
        geometry: heads and pool size.
        rows: number of rows.
        groups: rows by similar length.
        columns: flat pool row of every value: ``[values]`` int32 or int64. Values are ordered
            (row, kv head, chunk, head in group, key) when indexed, (row, kv head, key) when not.
        queries: int64 ``[bags]`` row of ``q.view(rows * Hq, D)`` of every bag (indexed only).
        offsets: first value of every bag, closed by the total: ``[bags + 1]`` (indexed only).
        pattern: sparse matrix of the bags by the flat pool; its values are the scores of all
            groups. None when KV is gathered instead.
        weights: float32 ``[values]``, the probabilities of all groups (indexed only).
    """

    geometry: Geometry
    rows: int
    groups: tuple[RowGroup, ...]
    columns: Tensor
    queries: Tensor
    offsets: Tensor
    pattern: Tensor | None
    weights: Tensor


def by_index(geometry: Geometry, dtype: torch.dtype) -> bool:
    """Whether one-query rows are better read by index than gathered."""
    return dtype == torch.float32 and geometry.group <= MAX_INDEXED_GROUP


def plan_single(
    slots: Tensor | Sequence[Tensor],
    lens: Sequence[int],
    geometry: Geometry,
    indexed: bool,
    page_size: int = 16,
) -> SinglePlan:
    """Plan rows of one query token.

    Args:
        slots: int64 ``[n, L]`` padded (padding is never read), or ``n`` tensors ``[len_i]``.
        lens: length of every row, at least 1.
        geometry: heads and pool size.
        indexed: read KV by index (float32 only) instead of gathering it.
        page_size: chunks are cut at multiples of it.

    Raises:
        ValueError: a row is empty, or a slot lies outside the pool.
    """
    if min(lens, default=1) < 1:
        raise ValueError("a row without any slot to attend to")
    index_type = geometry.index_type if indexed else torch.int64
    heads, group = geometry.num_kv_heads, geometry.group
    offsets = geometry.head_offsets(index_type).view(heads, 1, 1, 1)
    every_head = torch.arange(geometry.num_heads).view(heads, 1, group)
    groups: list[tuple[Tensor, list[int], int, int, Tensor | None, int, int]] = []
    columns: list[Tensor] = []
    queries: list[Tensor] = []
    bounds: list[Tensor] = []
    first = 0
    for members in _by_length(lens):
        longest = max(lens[member] for member in members)
        chunks = _chunks(longest, len(lens) * geometry.num_heads) if indexed else 1
        width = -(-longest // chunks)
        width = -(-width // page_size) * page_size
        rows, own = torch.tensor(members), torch.tensor([lens[row] for row in members])
        table = _padded(slots, members, own, chunks * width)
        check_slots(table, geometry.num_slots)
        flat = table.to(index_type).view(-1, 1, chunks, 1, width) + offsets
        flat = flat.expand(-1, -1, -1, group if indexed else 1, -1)
        columns.append(flat.reshape(-1))
        bag_queries = rows.view(-1, 1, 1, 1) * geometry.num_heads + every_head
        queries.append(bag_queries.expand(-1, -1, chunks, -1).reshape(-1))
        bags = queries[-1].numel()
        bounds.append(torch.arange(first, first + bags * width, width, dtype=index_type))
        padding = _padding(own, chunks, width)
        groups.append((rows, members, chunks, width, padding, first, bags))
        first += columns[-1].numel()
    all_columns = torch.cat([*columns, torch.empty(0, dtype=index_type)])
    all_queries = torch.cat([*queries, torch.empty(0, dtype=torch.int64)])
    all_bounds = torch.cat([*bounds, torch.tensor([first], dtype=index_type)])
    values = first if indexed else 0
    # Zeros, because the product adds 0 times the old value, which must not be NaN.
    scores, weights = torch.zeros(values), torch.empty(values)
    pattern = None
    if values:
        pattern = torch.sparse_csr_tensor(
            all_bounds,
            all_columns,
            scores,
            (all_queries.numel(), heads * geometry.num_slots),
            check_invariants=False,
        )
        scores = pattern.values()

    def finished(rows, members, chunks, width, padding, first, bags) -> RowGroup:
        shape = (len(members) if indexed else 0, heads, chunks, group, width)
        span = slice(first, first + math.prod(shape))
        views = scores[span].view(shape), weights[span].view(shape)
        in_order = members == list(range(len(lens)))
        return RowGroup(rows, members, chunks, width, padding, first, bags, *views, in_order)

    return SinglePlan(
        geometry,
        len(lens),
        tuple(finished(*parts) for parts in groups),
        all_columns,
        all_queries,
        all_bounds,
        pattern,
        weights,
    )


def attend_single(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: SinglePlan,
    scale: float,
    logit_cap: float = 0.0,
    want_probs: bool = False,
    out: Tensor | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """Attention of one-query rows over their planned slots.

    Args:
        q: ``[n, Hq, D]``.
        k, v: ``[Hkv, num_slots, D]`` contiguous pool of one layer, the dtype of ``q``.
        plan: from :func:`plan_single`.
        scale: factor of the scores.
        logit_cap: ``c`` of ``c * tanh(score / c)``; 0 for none.
        want_probs: also return the probabilities; the next layer overwrites them.
        out: ``[n, Hq, D]`` to write to; allocated if None.

    Returns:
        ``[n, Hq, D]`` in the dtype of ``q``, and, if wanted, for every group of the plan float32
        probabilities ``[rows, Hkv, chunks, group, width]``, 0 at padded keys.

    Raises:
        ValueError: another number of rows than planned.
    """
    if q.shape[0] != plan.rows:
        raise ValueError(f"{q.shape[0]} query rows for a plan of {plan.rows}")
    out = torch.empty_like(q) if out is None else out
    if plan.pattern is not None:
        probs = _attend_indexed(q, k, v, plan, scale, logit_cap, out)
    else:
        probs = [_attend_gathered(q, k, v, plan, g, scale, logit_cap, out) for g in plan.groups]
    if not want_probs:
        return out, []
    return out, [part if share is None else part * share for part, share in probs]


def _attend_indexed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: SinglePlan,
    scale: float,
    logit_cap: float,
    out: Tensor,
) -> list[tuple[Tensor, Tensor | None]]:
    """Write ``out``; return per group the probabilities within chunks and the chunks' shares."""
    heads, _, dim = k.shape
    group = plan.geometry.group
    folded = q.reshape(-1, dim).index_select(0, plan.queries)
    torch.sparse.sampled_addmm(
        plan.pattern, folded, k.view(-1, dim).t(), beta=0.0, alpha=scale, out=plan.pattern
    )
    shares: list[Tensor | None] = []
    for rows in plan.groups:
        _shape_scores(rows.scores, rows, logit_cap)
        torch.softmax(rows.scores, dim=-1, out=rows.probs)
        share = None
        if rows.chunks > 1:
            # The largest score and its probability give the log-sum-exp without another exp.
            lse = rows.scores.amax(-1, keepdim=True) - rows.probs.amax(-1, keepdim=True).log_()
            share = torch.softmax(lse, dim=2)
        shares.append(share)
    sums = torch.embedding_bag(
        v.view(-1, dim), plan.columns, plan.offsets, False, 0, False, plan.weights, True
    )[0]
    first = 0
    for rows, share in zip(plan.groups, shares, strict=True):
        part = sums[first : first + rows.bags].view(-1, heads, rows.chunks, group, dim)
        if share is not None:
            part = (part * share).sum(2)
        part = part.reshape(len(rows.members), -1, dim)
        if rows.all_in_order:
            out.copy_(part)
        else:
            out[rows.rows] = part
        first += rows.bags
    return [(rows.probs, share) for rows, share in zip(plan.groups, shares, strict=True)]


def _attend_gathered(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: SinglePlan,
    rows: RowGroup,
    scale: float,
    logit_cap: float,
    out: Tensor,
) -> tuple[Tensor, None]:
    """Write the group's rows of ``out``; return its probabilities."""
    heads, _, dim = k.shape
    count, group = len(rows.members), plan.geometry.group
    columns = plan.columns[rows.first : rows.first + count * heads * rows.width]
    x = q[rows.rows].view(count * heads, group, dim).float() * scale
    keys = k.view(-1, dim).index_select(0, columns).view(-1, rows.width, dim)
    scores = torch.bmm(x, keys.float().transpose(1, 2))
    shape = (count, heads, 1, group, rows.width)
    _shape_scores(scores.view(shape), rows, logit_cap)
    probs = torch.softmax(scores, dim=-1)
    values = v.view(-1, dim).index_select(0, columns).view(-1, rows.width, dim)
    out[rows.rows] = torch.bmm(probs.to(values.dtype), values).view(count, -1, dim)
    return probs.view(shape), None


def _shape_scores(scores: Tensor, rows: RowGroup, logit_cap: float) -> None:
    """Cap the scores and mask padded keys, in place."""
    if logit_cap:
        scores.div_(logit_cap).tanh_().mul_(logit_cap)
    if rows.padding is not None:
        tail = rows.chunks - rows.padding.shape[2]
        scores[:, :, tail:].masked_fill_(rows.padding, _MASKED)


def _by_length(lengths: Sequence[int]) -> list[list[int]]:
    """Group row indices by similar length, shortest group first, each in row order."""
    groups: list[list[int]] = []
    limit = -1.0
    for index in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        if lengths[index] <= limit:
            groups[-1].append(index)
        else:
            groups.append([index])
            limit = lengths[index] + max(MAX_PADDING * lengths[index], MAX_PADDED_KEYS)
    return [sorted(group) for group in groups]


def _padded(
    slots: Tensor | Sequence[Tensor], members: list[int], lens: Tensor, width: int
) -> Tensor:
    """Slots of some rows ``[n, width]``; a row is padded with its own first slot."""
    if isinstance(slots, Tensor):
        table = slots[torch.tensor(members), :width]
    else:
        table = pad_sequence([slots[member] for member in members], batch_first=True)
    table = torch.nn.functional.pad(table, (0, width - table.shape[1]))
    return torch.where(torch.arange(width) < lens.unsqueeze(1), table, table[:, :1])


def _chunks(longest: int, bags: int) -> int:
    """Chunks per row, so that few rows still give every thread several bags."""
    return max(1, min(-(-4 * torch.get_num_threads() // bags), longest // MIN_CHUNK))


def _padding(lens: Tensor, chunks: int, width: int) -> Tensor | None:
    """Mask of padded keys in the chunks that have any."""
    shortest = int(lens.min())
    if shortest == chunks * width:
        return None
    tail = shortest // width
    keys = torch.arange(tail * width, chunks * width).view(1, 1, -1, 1, width)
    return keys >= lens.view(-1, 1, 1, 1, 1)
