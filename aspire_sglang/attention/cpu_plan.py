"""How the rows of a step are cut into pieces of work for the threads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from aspire_sglang.attention.cpu_flash import KEYS, WIDTH
from aspire_sglang.attention.cpu_job import MERGE, PIECE
from aspire_sglang.attention.simd import HIDDEN

#: Query blocks of a piece: so often a block of keys is used once it has been read.
_BLOCKS = 4
#: Fewest keys of a piece whose row is shared out.
_FEWEST_KEYS = 512
#: Rows are shared out so that the largest piece is this share of a thread's work.
_PIECES_PER_THREAD = 6


@dataclass(frozen=True)
class Row:
    """One row of a step.

    Attributes:
        slots: int32 ``[L]``, contiguous: slot of every key, in order of position; or
            ``[lists, L]`` where layers read different keys. The row's query tokens are the last
            ones, each sees the keys up to itself.
        tokens: query tokens, at least 1.
        voters: up to two query tokens, counted from the row's first, whose attention scores the
            row's pages; ascending.
    """

    slots: Tensor
    tokens: int
    voters: tuple[int, ...] = ()

    @property
    def length(self) -> int:
        """Keys of the row."""
        return self.slots.shape[-1]

    @property
    def lists(self) -> float:
        """Lists of slots that the row has; infinite if all layers share one."""
        return self.slots.shape[0] if self.slots.dim() == 2 else math.inf


@dataclass
class RowsPlan:
    """Pieces of a step; holds the memory that they point to.

    Attributes:
        rows: the rows, in the order of their query tokens.
        starts: first query token of every row.
        tokens: query tokens of all rows.
        pieces: ``PIECE`` records, the most expensive first.
        merges: ``MERGE`` records.
        partials: partial results.
        blocks: most query blocks of a piece.
        votes: float32 ``[voters, num_heads, width]``: scores of all voting queries, base 2, row
            after row.
    """

    rows: list[Row]
    starts: list[int]
    tokens: int
    pieces: np.ndarray
    merges: np.ndarray
    partials: int
    blocks: int
    votes: Tensor = field(repr=False)

    @property
    def lists(self) -> float:
        """Lists of slots that every row has."""
        return min((row.lists for row in self.rows), default=math.inf)


def plan_rows(rows: Sequence[Row], num_heads: int, num_kv_heads: int, num_slots: int) -> RowsPlan:
    """Cut rows into pieces.

    Raises:
        ValueError: a row's lengths do not fit together, a voter or a slot does not exist.
    """
    group = num_heads // num_kv_heads
    starts, total = [], 0
    for number, row in enumerate(rows):
        _check(number, row, num_slots)
        starts.append(total)
        total += row.tokens
    voting = [row for row in rows if row.voters]
    width = max((row.length for row in voting), default=0)
    # A vector may read past the last key of a row.
    width += -width % WIDTH
    votes = torch.empty(sum(len(row.voters) for row in voting), num_heads, width)
    work = [_cut(row, start, group) for row, start in zip(rows, starts, strict=True)]
    costs = [sum(_cost(piece, group) for piece in pieces) for pieces in work]
    share = sum(costs) * num_kv_heads / (_PIECES_PER_THREAD * torch.get_num_threads())
    pieces: list[dict[str, Any]] = []
    merges: list[tuple[int, int, int, int]] = []
    partials = vote = 0
    for row, whole in zip(rows, work, strict=True):
        for piece in whole:
            parts = _share_out(piece, _cost(piece, group), share)
            if len(parts) > 1:
                merges.append((piece["token"], piece["tokens"], partials, len(parts)))
                for part in parts:
                    part["partial"] = partials
                    partials += 1
            offset = piece["token"] - whole[0]["token"]
            voters, addresses = [-1, -1], [0, 0]
            for n, voter in enumerate(row.voters):
                addresses[n] = votes.data_ptr() + 4 * (vote + n) * num_heads * width
                if offset <= voter < offset + piece["tokens"]:
                    voters[n] = voter - offset
                    # Keys behind the piece's last query are not looked at.
                    votes[vote + n, :, piece["stop"] :] = HIDDEN
            # The kernel looks at the first to know whether anyone votes.
            if voters[0] < 0:
                voters.reverse()
                addresses.reverse()
            pieces += [
                {**part, "voters": tuple(voters), "votes": tuple(addresses)} for part in parts
            ]
        vote += len(row.voters)
    pieces.sort(key=lambda piece: -_cost(piece, group))
    records = np.zeros(len(pieces), PIECE)
    for name in PIECE.names or ():
        records[name] = [piece[name] for piece in pieces] if pieces else 0
    most = max((piece["tokens"] for piece in pieces), default=1)
    return RowsPlan(
        list(rows),
        starts,
        total,
        records,
        np.array(merges, MERGE),
        partials,
        -(-most * group // WIDTH),
        votes,
    )


def _check(number: int, row: Row, num_slots: int) -> None:
    length = row.length
    if row.tokens < 1 or length < row.tokens:
        raise ValueError(f"row {number}: {row.tokens} query tokens in {length} positions")
    if row.slots.dtype != torch.int32 or not row.slots.is_contiguous():
        raise ValueError(f"row {number}: slots must be contiguous int32")
    if len(row.voters) > 2 or any(not 0 <= voter < row.tokens for voter in row.voters):
        raise ValueError(f"row {number}: {row.tokens} query tokens, votes asked of {row.voters}")
    # The kernels read by index without looking.
    low, high = (int(slot) for slot in torch.aminmax(row.slots))
    if low < 0 or high >= num_slots:
        raise ValueError(f"row {number}: slots {low} to {high} in a pool of {num_slots}")


def _cut(row: Row, start: int, group: int) -> list[dict[str, int]]:
    """Pieces of a row, all keys each, of as many query tokens as one piece may have."""
    most = max(1, _BLOCKS * WIDTH // group)
    before = row.length - row.tokens
    stride = 4 * row.length if row.slots.dim() == 2 else 0
    return [
        {
            "token": start + first,
            "tokens": min(most, row.tokens - first),
            "position": before + first,
            "slots": row.slots.data_ptr(),
            "list_stride": stride,
            "first": 0,
            "stop": before + min(first + most, row.tokens),
            "partial": -1,
        }
        for first in range(0, row.tokens, most)
    ]


def _cost(piece: dict, group: int) -> float:
    """Work of a piece: a part for reading a key and a part per vector of queries."""
    vectors = -(-2 * piece["tokens"] * group // WIDTH)
    return (piece["stop"] - piece["first"]) * (1 + vectors)


def _share_out(piece: dict[str, int], cost: float, share: float) -> list[dict[str, int]]:
    """Split a piece's keys so that no part costs much more than ``share``."""
    keys = piece["stop"]
    parts = min(-(-int(cost) // max(int(share), 1)), keys // _FEWEST_KEYS)
    if parts <= 1:
        return [piece]
    step = -(-keys // (parts * KEYS)) * KEYS
    return [
        {**piece, "first": first, "stop": min(first + step, keys)} for first in range(0, keys, step)
    ]
