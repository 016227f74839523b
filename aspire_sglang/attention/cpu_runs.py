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
#: Scores held at once by the many-query kernel, in elements (float32, so 32 MiB; the softmax
#: holds a second copy).
SCORE_BUDGET = 1 << 23
#: Most products (query heads of one KV head x tokens x keys) for which the keys outside long
#: runs are read by index; beyond it they are gathered, which costs once per key.
MAX_INDEXED = 24_000


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

    @property
    def end(self) -> int:
        return self.position + self.length


@dataclass(frozen=True)
class Piece:
    """Keys that one score matrix covers.

    Attributes:
        length: number of keys.
        slot: first slot when the keys are read in place, else -1.
        position: position of the first key when read in place, else -1.
        rows: int64 ``[Hkv * length]`` rows of the flat pool when gathered, else None.
        positions: int64 ``[length]`` positions of gathered keys, ascending, else None.
        causal: the last keys are the block's own tokens, to be masked causally.
    """

    length: int
    slot: int = -1
    position: int = -1
    rows: Tensor | None = None
    positions: Tensor | None = None
    causal: bool = False


@dataclass(frozen=True)
class Cover:
    """How positions ``0 .. visible`` are read.

    Attributes:
        visible: number of positions.
        pieces: keys read in place or gathered.
        tail: int64 positions read by index, ascending, or None.
        tail_is_own: the tail ends with the block's own tokens, to be masked causally.
    """

    visible: int
    pieces: tuple[Piece, ...]
    tail: Tensor | None = None
    tail_is_own: bool = False


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
        slots: int64 ``[L]``, ``L >= 1``.
        min_length: leave out shorter runs.

    Returns:
        Runs in order of position.
    """
    total = slots.numel()
    if total < min_length:
        return []
    breaks = (torch.diff(slots) != 1).nonzero().flatten().add_(1)
    bounds = torch.cat([breaks.new_zeros(1), breaks, breaks.new_full((1,), total)])
    lengths = torch.diff(bounds)
    kept = (lengths >= min_length).nonzero().flatten()
    starts = bounds[kept]
    table = torch.stack([starts, slots[starts], lengths[kept]], 1).tolist()
    return [Run(*entry) for entry in table]


def cover(
    slots: Tensor,
    runs: list[Run],
    visible: int,
    tokens: int,
    geometry: Geometry,
    index_tail: bool,
) -> Cover:
    """Cover positions ``0 .. visible``, keeping the last ``tokens`` of them together.

    Args:
        slots: int64 ``[L]``, ``L >= visible``.
        runs: the row's runs of at least ``MIN_VIEW``, in order.
        visible: positions to cover.
        tokens: positions at the end that belong to the block's own tokens; 0 for none.
        geometry: heads and pool size.
        index_tail: leave what is not read in place to be read by index, if it is short.
    """
    max_keys = max(MIN_VIEW, tokens, SCORE_BUDGET // (geometry.group * max(tokens, 1)))
    before = visible - tokens
    pieces: list[Piece] = []
    gaps: list[tuple[int, int]] = []
    covered = 0
    for run in runs:
        # Either the run holds all of the block's own tokens, or it is read only up to them.
        holds_own = run.position <= before and run.end >= visible
        end = visible if holds_own else min(run.end, before)
        if end - run.position < MIN_VIEW:
            continue
        if run.position > covered:
            gaps.append((covered, run.position))
        for first, last in _cuts(run.position, end, max_keys):
            slot = run.slot + first - run.position
            pieces.append(Piece(last - first, slot, first, causal=tokens > 0 and last == visible))
        covered = end
    own = tokens > 0 and covered < visible
    if covered < visible:
        gaps.append((covered, visible))
    if not gaps:
        return Cover(visible, tuple(pieces))
    positions = torch.cat([torch.arange(first, last) for first, last in gaps])
    total = positions.numel()
    if index_tail and total * tokens * geometry.group <= MAX_INDEXED:
        return Cover(visible, tuple(pieces), positions, own)
    for first, last in _cuts(0, total, max_keys):
        pieces.append(gathered(slots, positions[first:last], geometry, own and last == total))
    return Cover(visible, tuple(pieces))


def gathered(slots: Tensor, positions: Tensor, geometry: Geometry, causal: bool) -> Piece:
    """A piece of the keys at ``positions`` (int64 ``[n]``), to be gathered."""
    rows = (geometry.head_offsets().unsqueeze(1) + slots[positions]).flatten()
    return Piece(positions.numel(), rows=rows, positions=positions, causal=causal)


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


def _cuts(start: int, end: int, size: int) -> list[tuple[int, int]]:
    """Cut ``start .. end`` into ranges of ``size``; a shorter one comes first."""
    cuts = []
    while end > start:
        cuts.append((max(start, end - size), end))
        end -= size
    return cuts[::-1]
