"""Where a request's KV lies: contiguous slot runs that can be read in place, and the rest.

A request's slots are one int64 tensor, ``slots[p]`` being the slot of position ``p``. A prefill
gets its slots in one stretch, so most of a long context is one run of consecutive slots and the
kernels read it as a view. What short runs remain (decode tokens of a busy batch) are read by
index or gathered. Planning happens once per forward and is shared by all layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

#: A run of at least this many slots is read in place.
MIN_VIEW = 384
#: Views are this many slots or a multiple of it, so that they split evenly.
VIEW_STEP = 64


@dataclass(frozen=True)
class Geometry:
    """Head counts and pool size that every plan depends on.

    Attributes:
        num_heads: query heads ``Hq``.
        num_kv_heads: KV heads ``Hkv``; must divide ``num_heads``.
        num_slots: slots of one KV head in the pool (``k.shape[1]``).
    """

    num_heads: int
    num_kv_heads: int
    num_slots: int

    def __post_init__(self) -> None:
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"{self.num_heads} query heads do not divide over {self.num_kv_heads} KV heads"
            )

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def index_type(self) -> torch.dtype:
        """The smallest integer type that indexes ``k.view(Hkv * num_slots, D)``."""
        return torch.int32 if self.num_kv_heads * self.num_slots < 2**31 else torch.int64

    def head_offsets(self, dtype: torch.dtype = torch.int64) -> Tensor:
        """First flat row of every KV head in ``k.view(Hkv * num_slots, D)``: ``[Hkv]``."""
        return torch.arange(self.num_kv_heads, dtype=dtype) * self.num_slots


@dataclass(frozen=True)
class Run:
    """``length`` consecutive positions from ``position`` stored in slots from ``slot``."""

    position: int
    slot: int
    length: int


@dataclass(frozen=True)
class Piece:
    """Keys that are read together: in place, or gathered.

    Attributes:
        length: number of keys.
        positions: their positions, a range or int64 ``[length]``.
        slot: first slot of keys that are read in place.
        rows: int64 ``[Hkv * length]`` rows of the flat pool of keys that are gathered, or None.
    """

    length: int
    positions: slice | Tensor
    slot: int = -1
    rows: Tensor | None = None


def check_slots(slots: Tensor, num_slots: int) -> None:
    """Refuse slots outside the pool: the kernels read by index without looking.

    Raises:
        ValueError: a slot is negative or not below ``num_slots``.
    """
    low, high = (int(x) for x in torch.aminmax(slots))
    if low < 0 or high >= num_slots:
        raise ValueError(f"slots {low} to {high} in a pool of {num_slots}")


def find_runs(slots: Tensor, min_length: int = 1) -> list[Run]:
    """Maximal runs of consecutive slots.

    Args:
        slots: int64 ``[L]``.
        min_length: leave out shorter runs.

    Returns:
        Runs in order of position.
    """
    total = slots.numel()
    if total < max(min_length, 1):
        return []
    breaks = (torch.diff(slots) != 1).nonzero().flatten().add_(1)
    bounds = torch.cat([breaks.new_zeros(1), breaks, breaks.new_full((1,), total)])
    lengths = torch.diff(bounds)
    kept = (lengths >= min_length).nonzero().flatten()
    starts = bounds[kept]
    table = torch.stack([starts, slots[starts], lengths[kept]], 1).tolist()
    return [Run(*entry) for entry in table]


def split_runs(slots: Tensor) -> tuple[list[Piece], Tensor]:
    """Split slots into pieces to read in place and the positions that remain.

    Args:
        slots: int64 ``[L]``.

    Returns:
        The pieces, and int64 positions outside all of them, ascending.
    """
    pieces: list[Piece] = []
    gaps: list[Tensor] = []
    covered = 0
    for run in find_runs(slots, MIN_VIEW):
        length = run.length - run.length % VIEW_STEP
        end = run.position + length
        gaps.append(torch.arange(covered, run.position))
        pieces.append(Piece(length, slice(run.position, end), slot=run.slot))
        covered = end
    gaps.append(torch.arange(covered, slots.numel()))
    return pieces, torch.cat(gaps)


def gather(slots: Tensor, positions: Tensor, geometry: Geometry) -> Piece:
    """A piece of the keys at ``positions`` (int64 ``[n]``), to be gathered."""
    rows = (geometry.head_offsets().unsqueeze(1) + slots[positions]).flatten()
    return Piece(positions.numel(), positions, rows=rows)


def read_piece(pool: Tensor, piece: Piece) -> Tensor:
    """Keys or values of a piece: ``[Hkv, length, D]``, every head contiguous.

    Args:
        pool: ``[Hkv, num_slots, D]`` contiguous.
        piece: which of them.
    """
    if piece.rows is None:
        return pool[:, piece.slot : piece.slot + piece.length]
    heads, _, dim = pool.shape
    return pool.view(-1, dim).index_select(0, piece.rows).view(heads, piece.length, dim)
