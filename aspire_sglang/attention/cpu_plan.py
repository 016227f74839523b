"""Plan of full attention for a ragged batch: which kernel reads which keys of which row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from aspire_sglang.attention.cpu_many import RowPlan, plan_row
from aspire_sglang.attention.cpu_runs import Geometry, check_slots
from aspire_sglang.attention.cpu_single import SinglePlan, by_index, plan_single


@dataclass(frozen=True)
class FullPlan:
    """Plan of rows that read their whole context.

    One-query rows read everything by index. Rows of more queries read long runs of slots in
    place and the rest by index, each query token as a one-query row of its own.

    Attributes:
        geometry: heads and pool size.
        tokens: query tokens of the batch.
        starts: first query token of every row.
        lens: query tokens of every row.
        context: positions of every row.
        page_size: positions per page of the scores.
        single: plan of all one-query rows, or None: first whole rows, then tails.
        single_rows: the whole rows, in the order of ``single``.
        single_tokens: int64 ``[n]``, the query token of every one-query row.
        complete: int64, the one-query rows that need no merging: whole rows, and the tails of
            rows that have nothing else.
        many: the other rows: their plan and their first tail among the one-query rows (-1 for
            none).
    """

    geometry: Geometry
    tokens: int
    starts: tuple[int, ...]
    lens: tuple[int, ...]
    context: tuple[int, ...]
    page_size: int
    single: SinglePlan | None
    single_rows: tuple[int, ...]
    single_tokens: Tensor
    complete: Tensor
    many: dict[int, tuple[RowPlan, int]]


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
        ValueError: lengths that do not fit together, or a slot outside the pool.
    """
    if len(slots_per_row) != len(q_lens):
        raise ValueError(f"{len(slots_per_row)} rows of slots but {len(q_lens)} query lengths")
    context = tuple(slots.numel() for slots in slots_per_row)
    lens = tuple(int(n) for n in q_lens)
    starts, total = [], 0
    for row, (length, queries) in enumerate(zip(context, lens, strict=True)):
        if queries < 1 or length < queries:
            raise ValueError(f"row {row}: {queries} query tokens in {length} positions")
        starts.append(total)
        total += queries
    whole_by_index = by_index(geometry, dtype)
    singles = [row for row, queries in enumerate(lens) if queries == 1 and whole_by_index]
    sources = [slots_per_row[row] for row in singles]
    lists = _Lists(
        sources,
        list(range(len(singles))),
        [context[row] for row in singles],
        [starts[row] for row in singles],
        list(range(len(singles))),
    )
    many: dict[int, tuple[RowPlan, int]] = {}
    for row, (slots, queries) in enumerate(zip(slots_per_row, lens, strict=True)):
        if queries > 1 or not whole_by_index:
            check_slots(slots, geometry.num_slots)
            plan = plan_row(slots, queries, geometry, index_tail=dtype == torch.float32)
            many[row] = (plan, lists.add_tail(slots, plan, starts[row]))
    single = None
    if lists.lens:
        single = plan_single(
            lists.slots,
            lists.lens,
            geometry,
            True,
            page_size,
            sources=lists.sources,
            merging=len(singles),
        )
    return FullPlan(
        geometry,
        total,
        tuple(starts),
        lens,
        context,
        page_size,
        single,
        tuple(singles),
        torch.tensor(lists.tokens, dtype=torch.int64),
        torch.tensor(lists.complete, dtype=torch.int64),
        many,
    )


@dataclass
class _Lists:
    """One-query rows being collected: distinct slot lists, and per row its list, length, token.

    ``complete`` holds the rows that need no merging.
    """

    slots: list[Tensor]
    sources: list[int]
    lens: list[int]
    tokens: list[int]
    complete: list[int]

    def add_tail(self, slots: Tensor, plan: RowPlan, start: int) -> int:
        """Add a one-query row per query token of a row for its tail; the first one, or -1."""
        if plan.tail is None:
            return -1
        first = len(self.lens)
        length = plan.tail.numel()
        if not plan.prefix:
            self.complete.extend(range(first, first + plan.tokens))
        self.slots.append(slots[plan.tail])
        for token in range(plan.tokens):
            self.sources.append(len(self.slots) - 1)
            self.lens.append(length - (plan.tokens - 1 - token))
            self.tokens.append(start + token)
        return first
