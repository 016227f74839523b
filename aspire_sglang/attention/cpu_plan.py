"""Plan of full attention for a ragged batch: which kernel reads which row."""

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

    Attributes:
        geometry: heads and pool size.
        tokens: query tokens of the batch.
        starts: first query token of every row.
        lens: query tokens of every row.
        context: positions of every row.
        page_size: positions per page of the scores.
        single: plan of the one-query rows that are read by index together, or None.
        single_rows: these rows, in the order of ``single``.
        single_tokens: int64, their query tokens.
        many: plans of all other rows, each attended on its own.
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
    many: dict[int, RowPlan]


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
    together = by_index(geometry, dtype)
    singles = [row for row, queries in enumerate(lens) if queries == 1 and together]
    single = None
    if singles:
        lists, lengths = [slots_per_row[row] for row in singles], [context[row] for row in singles]
        single = plan_single(lists, lengths, geometry, together, page_size)
    many: dict[int, RowPlan] = {}
    for row, (slots, queries) in enumerate(zip(slots_per_row, lens, strict=True)):
        if queries > 1 or not together:
            check_slots(slots, geometry.num_slots)
            many[row] = plan_row(slots, queries, geometry)
    return FullPlan(
        geometry,
        total,
        tuple(starts),
        lens,
        context,
        page_size,
        single,
        tuple(singles),
        torch.tensor([starts[row] for row in singles], dtype=torch.int64),
        many,
    )
