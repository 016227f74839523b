"""Where a request's KV lies: contiguous slot runs that can be read in place, the rest gathered.

A request's slots are one int64 tensor, ``slots[p]`` being the slot of position ``p``. A prefill
gets its slots in one stretch, so most of a long context is one run of consecutive slots and the
kernels read it as a view. Short runs (decode tokens of a busy batch) are cheaper to gather into
one small buffer. Planning happens once per forward and is shared by all layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

#: A run of at least this many slots is read in place; shorter ones are gathered.
MIN_VIEW = 256
#: Scores held at once by the many-query kernel, in elements (float32, so 32 MiB; the softmax
#: holds a second copy).
SCORE_BUDGET = 1 << 23
#: Most query tokens of one block.
MAX_BLOCK_TOKENS = 128


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

    def head_offsets(self) -> Tensor:
        """First flat row of every KV head in ``k.view(Hkv * num_slots, D)``: int64 ``[Hkv]``."""
        return torch.arange(self.num_kv_heads, dtype=torch.int64) * self.num_slots


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
class Block:
    """Query tokens ``start .. start + tokens`` of a row, and the pieces that cover what they see.

    Attributes:
        start: first token of the block, counted from the row's first query token.
        tokens: query tokens in the block.
        visible: number of positions the block's last token sees.
        pieces: disjoint pieces that cover positions ``0 .. visible``.
    """

    start: int
    tokens: int
    visible: int
    pieces: tuple[Piece, ...]


def find_runs(slots: Tensor) -> list[Run]:
    """Split slots into maximal runs of consecutive slots.

    Args:
        slots: int64 ``[L]``, ``L >= 1``.

    Returns:
        Runs in order of position that together cover ``0 .. L``.
    """
    breaks = (torch.diff(slots) != 1).nonzero().flatten().add_(1).tolist()
    starts = [0, *breaks]
    ends = [*breaks, slots.numel()]
    first = slots[torch.tensor(starts)].tolist()
    return [Run(a, s, b - a) for a, b, s in zip(starts, ends, first, strict=True)]


def plan_blocks(
    slots: Tensor, query_len: int, geometry: Geometry, min_view: int = MIN_VIEW
) -> list[Block]:
    """Plan the attention of a row whose queries are its last ``query_len`` positions.

    Args:
        slots: int64 ``[L]`` slots of the row, ``L >= query_len``.
        query_len: query tokens of the row, at least 1.
        geometry: heads and pool size.
        min_view: shortest run that is read in place.

    Returns:
        Blocks that together cover the row's query tokens.
    """
    context = slots.numel()
    runs = [run for run in find_runs(slots) if run.length >= min_view]
    longest = max((run.length for run in runs), default=0)
    per_token = geometry.group * max(longest, 1)
    step = max(1, min(MAX_BLOCK_TOKENS, SCORE_BUDGET // per_token, query_len))
    blocks = []
    for start in range(0, query_len, step):
        tokens = min(step, query_len - start)
        visible = context - query_len + start + tokens
        pieces = _pieces(slots, runs, visible, tokens, geometry, min_view)
        blocks.append(Block(start, tokens, visible, pieces))
    return blocks


def _pieces(
    slots: Tensor, runs: list[Run], visible: int, tokens: int, geometry: Geometry, min_view: int
) -> tuple[Piece, ...]:
    """Cover positions ``0 .. visible``; the last ``tokens`` of them end the one causal piece."""
    max_keys = max(min_view, tokens, SCORE_BUDGET // (geometry.group * tokens))
    before = visible - tokens
    pieces: list[Piece] = []
    gaps: list[tuple[int, int]] = []
    covered = 0
    for run in runs:
        # Either the run holds all of the block's own tokens, or it is read only up to them.
        holds_own = run.position <= before and run.end >= visible
        end = visible if holds_own else min(run.end, before)
        if end - run.position < min_view:
            continue
        if run.position > covered:
            gaps.append((covered, run.position))
        for first, last in _cuts(run.position, end, max_keys):
            slot = run.slot + first - run.position
            pieces.append(Piece(last - first, slot, first, causal=last == visible))
        covered = end
    gathers_own = covered < visible
    if gathers_own:
        gaps.append((covered, visible))
    if gaps:
        positions = torch.cat([torch.arange(first, last) for first, last in gaps])
        total = positions.numel()
        for first, last in _cuts(0, total, max_keys):
            part = positions[first:last]
            rows = (geometry.head_offsets().unsqueeze(1) + slots[part]).flatten()
            causal = gathers_own and last == total
            pieces.append(Piece(last - first, rows=rows, positions=part, causal=causal))
    return tuple(pieces)


def _cuts(start: int, end: int, size: int) -> list[tuple[int, int]]:
    """Cut ``start .. end`` into ranges of ``size``; a shorter one comes first."""
    cuts = []
    while end > start:
        cuts.append((max(start, end - size), end))
        end -= size
    return cuts[::-1]
