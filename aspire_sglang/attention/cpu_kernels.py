"""Attention kernels of the CPU path in pure PyTorch: full, sparse, and scores per page.

The pool of one layer is ``k, v: [Hkv, num_slots, D]``, contiguous, float32 or bfloat16. Queries
are ``[T, Hq, D]``, the rows of a batch one after another. Plans hold everything that depends
only on slots and lengths: build them once per forward and pass them to every layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from aspire_sglang.attention.cpu_many import attend_block
from aspire_sglang.attention.cpu_runs import Block, Geometry, plan_blocks
from aspire_sglang.attention.cpu_single import SinglePlan, attend_single, plan_single

__all__ = [
    "FullPlan",
    "Geometry",
    "SinglePlan",
    "Vote",
    "full_attention",
    "full_attention_with_scores",
    "plan_full",
    "plan_sparse",
    "sparse_attention",
]


@dataclass(frozen=True)
class Vote:
    """Which queries of a row vote for its pages.

    Attributes:
        row: row of the plan.
        queries: query tokens of the row (0-based; negative counts from the end).
    """

    row: int
    queries: tuple[int, ...] = (-1,)


@dataclass(frozen=True)
class FullPlan:
    """Plan of rows that read their whole context.

    Attributes:
        geometry: heads and pool size.
        tokens: query tokens of the batch.
        starts: first query token of every row.
        lens: query tokens of every row.
        context: positions of every row.
        single: plan of the one-query rows that are read by index, or None.
        single_rows: their rows, in the order of ``single``.
        single_tokens: int64, their query tokens.
        blocks: for every other row its blocks.
        page_size: positions per page of the scores.
    """

    geometry: Geometry
    tokens: int
    starts: tuple[int, ...]
    lens: tuple[int, ...]
    context: tuple[int, ...]
    single: SinglePlan | None
    single_rows: tuple[int, ...]
    single_tokens: Tensor
    blocks: dict[int, list[Block]]
    page_size: int


def plan_full(
    slots_per_row: Sequence[Tensor],
    q_lens: Sequence[int],
    geometry: Geometry,
    dtype: torch.dtype = torch.float32,
    page_size: int = 16,
) -> FullPlan:
    """Plan full attention for a ragged batch.

    Args:
        slots_per_row: int64 ``[L_i]`` slot of every position of row ``i``, the query tokens'
            own positions included (they are the last ``q_lens[i]``).
        q_lens: query tokens of every row, at least 1.
        geometry: heads and pool size.
        dtype: dtype of the pool.
        page_size: positions per page of the scores.

    Raises:
        ValueError: lengths that do not fit together.
    """
    if len(slots_per_row) != len(q_lens):
        raise ValueError(f"{len(slots_per_row)} rows of slots but {len(q_lens)} query lengths")
    context = tuple(slots.numel() for slots in slots_per_row)
    lens = tuple(int(n) for n in q_lens)
    for row, (length, queries) in enumerate(zip(context, lens, strict=True)):
        if queries < 1 or length < queries:
            raise ValueError(f"row {row}: {queries} query tokens in {length} positions")
    starts, total = [], 0
    for queries in lens:
        starts.append(total)
        total += queries
    by_index = dtype == torch.float32 and geometry.group <= _MAX_FULL_INDEXED_GROUP
    singles = [row for row, queries in enumerate(lens) if queries == 1 and by_index]
    single = None
    if singles:
        rows = [slots_per_row[row] for row in singles]
        single = plan_single(rows, [context[r] for r in singles], geometry, dtype, page_size)
    blocks = {
        row: plan_blocks(slots_per_row[row], lens[row], geometry)
        for row in range(len(lens))
        if row not in set(singles)
    }
    tokens = torch.tensor([starts[row] for row in singles], dtype=torch.int64)
    return FullPlan(
        geometry,
        total,
        tuple(starts),
        lens,
        context,
        single,
        tuple(singles),
        tokens,
        blocks,
        page_size,
    )


#: Largest group for which a long one-query row is read by index instead of by matrix products.
_MAX_FULL_INDEXED_GROUP = 4


def full_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: FullPlan,
    scale: float,
    out: Tensor | None = None,
    logit_cap: float = 0.0,
) -> Tensor:
    """Attention of every row over its whole context, causal among its own query tokens.

    Args:
        q: ``[T, Hq, D]``, rows one after another.
        k, v: ``[Hkv, num_slots, D]`` contiguous pool of one layer, the dtype of ``q``; the KV of
            the query tokens must be written already.
        plan: from :func:`plan_full`.
        scale: factor of the scores.
        out: ``[T, Hq, D]`` to write to; allocated if None.
        logit_cap: ``c`` of ``c * tanh(score / c)``; 0 for none.

    Returns:
        ``out``.

    Raises:
        ValueError: shapes that do not fit the plan.
    """
    return full_attention_with_scores(q, k, v, plan, scale, (), out, logit_cap)[0]


def full_attention_with_scores(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: FullPlan,
    scale: float,
    votes: Sequence[Vote],
    out: Tensor | None = None,
    logit_cap: float = 0.0,
    reduction: str = "max",
) -> tuple[Tensor, list[Tensor]]:
    """:func:`full_attention` that also scores pages, from the same probabilities.

    A token's score is the ``reduction`` over query heads of its softmax probability, averaged
    over the voting queries; a page's score is the sum over its positions.

    Args:
        votes: rows whose pages are wanted, and the queries that vote there.
        reduction: ``"max"``, ``"mean"`` or ``"sum"`` over query heads.

    Returns:
        The attention output, and per vote float32 ``[ceil(context / page_size)]``.

    Raises:
        ValueError: shapes that do not fit the plan, or a vote outside its row.
    """
    _check(q, k, v, plan.geometry)
    if q.shape[0] != plan.tokens:
        raise ValueError(f"{q.shape[0]} query tokens for a plan of {plan.tokens}")
    if out is None:
        out = torch.empty_like(q)
    wanted = {vote.row: _voting(vote, plan) for vote in votes}
    scores: dict[int, Tensor] = {}
    if plan.single is not None:
        listed = [i for i, row in enumerate(plan.single_rows) if row in wanted]
        everything = len(plan.single_rows) == plan.tokens
        rows = q if everything else q[plan.single_tokens]
        part, probs = attend_single(rows, k, v, plan.single, scale, logit_cap, bool(listed))
        out[plan.single_tokens] = part
        for group, prob in zip(plan.single.groups, probs, strict=False):
            token_scores = _reduce(prob, (1, 3), reduction).flatten(1)
            pages = token_scores.view(len(group.rows), -1, plan.page_size).sum(-1)
            for index, member in enumerate(group.rows.tolist()):
                row = plan.single_rows[member]
                scores[row] = pages[index, : -(-plan.context[row] // plan.page_size)]
    for row, blocks in plan.blocks.items():
        voting = wanted.get(row, ())
        tokens = torch.zeros(plan.context[row]) if voting else None
        for block in blocks:
            first = plan.starts[row] + block.start
            here = [n - block.start for n in voting if 0 <= n - block.start < block.tokens]
            last = first + block.tokens
            part, prob = attend_block(q[first:last], k, v, block, scale, logit_cap, here)
            out[first:last] = part
            if prob is not None and tokens is not None:
                share = _reduce(prob, (0, 2), reduction).sum(0).div_(len(voting))
                tokens[: block.visible] += share
        if tokens is not None:
            scores[row] = _page_sums(tokens, plan.page_size)
    return out, [scores[vote.row] for vote in votes]


def plan_sparse(
    slots: Tensor,
    lens: Tensor,
    geometry: Geometry,
    dtype: torch.dtype = torch.float32,
) -> SinglePlan:
    """Plan draft rows: one query token each on a short list of slots.

    Args:
        slots: int64 ``[n, L]``; entries from ``lens[i]`` on are ignored.
        lens: int64 ``[n]``, each at least 1.
        geometry: heads and pool size.
        dtype: dtype of the pool.

    Raises:
        ValueError: a row is empty or longer than ``L``.
    """
    lengths = lens.tolist()
    if lengths and max(lengths) > slots.shape[1]:
        raise ValueError(f"a row of {max(lengths)} slots in a table of {slots.shape[1]}")
    return plan_single(slots, lengths, geometry, dtype)


def sparse_attention(
    q: Tensor, k: Tensor, v: Tensor, plan: SinglePlan, scale: float, logit_cap: float = 0.0
) -> Tensor:
    """Attention of draft rows over their slot lists.

    Args:
        q: ``[n, Hq, D]``.
        k, v: ``[Hkv, num_slots, D]`` contiguous pool of one layer, the dtype of ``q``.
        plan: from :func:`plan_sparse`.
        scale: factor of the scores.
        logit_cap: ``c`` of ``c * tanh(score / c)``; 0 for none.

    Returns:
        ``[n, Hq, D]``.
    """
    _check(q, k, v, plan.geometry)
    return attend_single(q, k, v, plan, scale, logit_cap)[0]


def _check(q: Tensor, k: Tensor, v: Tensor, geometry: Geometry) -> None:
    pool = (geometry.num_kv_heads, geometry.num_slots)
    if k.shape[:2] != pool or v.shape != k.shape:
        raise ValueError(f"pool {tuple(k.shape)} and {tuple(v.shape)}, planned for {pool}")
    if q.shape[1:] != (geometry.num_heads, k.shape[2]):
        raise ValueError(f"queries {tuple(q.shape)} for {geometry.num_heads} heads")
    if not (k.is_contiguous() and v.is_contiguous()):
        raise ValueError("the KV pool must be contiguous")
    if q.dtype != k.dtype or k.dtype != v.dtype:
        raise ValueError(f"queries are {q.dtype}, keys {k.dtype}, values {v.dtype}")


def _voting(vote: Vote, plan: FullPlan) -> tuple[int, ...]:
    """Voting query tokens of a row, counted from its first one, without repeats."""
    count = plan.lens[vote.row]
    if not vote.queries or any(not -count <= n < count for n in vote.queries):
        raise ValueError(f"row {vote.row} has {count} query tokens, votes asked of {vote.queries}")
    return tuple(sorted({n % count for n in vote.queries}))


def _reduce(probs: Tensor, dims: tuple[int, int], reduction: str) -> Tensor:
    """Reduce probabilities over the two head dimensions."""
    if reduction == "max":
        return probs.amax(dims)
    if reduction == "mean":
        return probs.mean(dims)
    if reduction == "sum":
        return probs.sum(dims)
    raise ValueError(f"unknown reduction {reduction!r}")


def _page_sums(tokens: Tensor, page_size: int) -> Tensor:
    """Sum token scores ``[L]`` inside pages: ``[ceil(L / page_size)]``."""
    padded = torch.nn.functional.pad(tokens, (0, -tokens.numel() % page_size))
    return padded.view(-1, page_size).sum(-1)
