"""Attention kernels of the CPU path in pure PyTorch: full, sparse, and scores per page.

The pool of one layer is ``k, v: [Hkv, num_slots, D]``, contiguous, float32 or bfloat16. Queries
are ``[T, Hq, D]``, the rows of a batch one after another. Plans hold everything that depends
only on slots and lengths: build them once per forward and pass them to every layer. A plan also
owns scratch memory, so one plan serves one thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from aspire_sglang.attention.cpu_many import attend_row, row_probs
from aspire_sglang.attention.cpu_plan import FullPlan, plan_full
from aspire_sglang.attention.cpu_runs import Geometry
from aspire_sglang.attention.cpu_single import (
    SinglePlan,
    attend_single,
    by_index,
    plan_single,
)

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
    over the voting queries; a page's score is the sum over its positions. One-query rows have the
    probabilities at hand; voters of other rows cost a pass of their own over the keys.

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
    out = torch.empty_like(q) if out is None else out
    voters = {vote.row: _voters(vote, plan) for vote in votes}
    scores: dict[int, Tensor] = {}
    if plan.single is not None:
        alone = not plan.many
        queries = q if alone else q[plan.single_tokens]
        target = out if alone else None
        part, probs = attend_single(
            queries, k, v, plan.single, scale, logit_cap, bool(voters), target
        )
        if not alone:
            out[plan.single_tokens] = part
        scores.update(_single_scores(plan, probs, set(voters), reduction))
    for row, row_plan in plan.many.items():
        span = slice(plan.starts[row], plan.starts[row] + plan.lens[row])
        out[span], lse = attend_row(q[span], k, v, row_plan, scale, logit_cap)
        if row in voters:
            prob = row_probs(q[span], k, row_plan, lse, voters[row], scale, logit_cap)
            scores[row] = _page_sums(_reduce(prob, (0, 2), reduction).mean(0), plan.page_size)
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
        ValueError: a row is empty or longer than ``L``, or a slot lies outside the pool.
    """
    lengths: list[int] = lens.tolist()
    if max(lengths, default=0) > slots.shape[1]:
        raise ValueError(f"a row of {max(lengths)} slots in a table of {slots.shape[1]}")
    return plan_single(slots, lengths, geometry, by_index(geometry, dtype))


def sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: SinglePlan,
    scale: float,
    out: Tensor | None = None,
    logit_cap: float = 0.0,
) -> Tensor:
    """Attention of draft rows over their slot lists.

    Args:
        q: ``[n, Hq, D]``.
        k, v: ``[Hkv, num_slots, D]`` contiguous pool of one layer, the dtype of ``q``.
        plan: from :func:`plan_sparse`.
        scale: factor of the scores.
        out: ``[n, Hq, D]`` to write to; allocated if None.
        logit_cap: ``c`` of ``c * tanh(score / c)``; 0 for none.

    Returns:
        ``out``.

    Raises:
        ValueError: shapes that do not fit the plan.
    """
    _check(q, k, v, plan.geometry)
    return attend_single(q, k, v, plan, scale, logit_cap, out=out)[0]


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


def _voters(vote: Vote, plan: FullPlan) -> tuple[int, ...]:
    """Voting query tokens of a row, counted from its first one, without repeats."""
    count = plan.lens[vote.row]
    if not vote.queries or any(not -count <= n < count for n in vote.queries):
        raise ValueError(f"row {vote.row} has {count} query tokens, votes asked of {vote.queries}")
    return tuple(sorted({n % count for n in vote.queries}))


def _single_scores(
    plan: FullPlan, probs: list[Tensor], wanted: set[int], reduction: str
) -> dict[int, Tensor]:
    """Page scores of the wanted rows among those that are read by index."""
    assert plan.single is not None
    scores: dict[int, Tensor] = {}
    # Without a voter there are no probabilities.
    for group, values in zip(plan.single.groups, probs, strict=False):
        rows = [plan.single_rows[member] for member in group.members]
        if wanted.isdisjoint(rows):
            continue
        pages = _page_sums(_reduce(values, (1, 3), reduction).flatten(1), plan.page_size)
        for index, row in enumerate(rows):
            if row in wanted:
                scores[row] = pages[index, : -(-plan.context[row] // plan.page_size)]
    return scores


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
    """Sum token scores ``[..., L]`` inside pages: ``[..., ceil(L / page_size)]``."""
    padded = torch.nn.functional.pad(tokens, (0, -tokens.shape[-1] % page_size))
    return padded.unflatten(-1, (-1, page_size)).sum(-1)
