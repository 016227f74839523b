"""Choosing the pages of :class:`~aspire_sglang.context.layer_lists.LayerLists` on the device: own
pages of every layer or group of layers, and shared pages, best first.

A program chooses the pages of a row as :mod:`aspire_sglang.kernels.page_selection` does, in
ascending order, and then gives each the place that its score deserves: the number of chosen pages
that beat it.

Scores of own pages are kept until all layers have voted, and one launch chooses for all of them. In
a captured step, which launches everything whether or not somebody verifies, a launch per voting
layer would cost microseconds each, in every step; the memory, ``[lists, rows, pages]`` float32, is
16 MB for 256 rows of 8,192 tokens in 16-token pages and 30 lists.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from aspire_sglang.context.layer_lists import LayerLists
from aspire_sglang.kernels.page_selection import (
    MAX_PAGES,
    ROW_REGISTERS,
    budget_of,
    check_rows,
    free_pages,
    ordered_bits,
    row_block,
    row_warps,
    selection_constants,
    store_fitting,
)

_MINE = 256
"""Most pages whose places are counted at once, against ``_OTHERS`` others."""
_OTHERS = 16


def scratch_size(lists: LayerLists, rows: int) -> int:
    """int32 entries of scratch memory that the selection of ``rows`` rows needs."""
    return rows * max(lists.num_lists * lists.own.shape[2], lists.ranked.shape[1])


def select_shared(
    page_scores: Tensor, context_lens: Tensor, slots: Tensor, lists: LayerLists, scratch: Tensor
) -> None:
    """:meth:`LayerLists.set_ranked`; of equal scores the lowest page is the better one.

    Args:
        page_scores: ``[n, P]`` float32; entries past a row's last page are ignored, NaN counts as
            the lowest score.
        context_lens: ``[n]`` int tokens per context.
        slots: ``[n]`` int slot of the lists per row, distinct; negative rows are padding and inert.
        lists: the state to write to.
        scratch: int32, of :func:`scratch_size`.

    Raises:
        ValueError: arguments that do not fit each other, or lists that could be too narrow.
    """
    if page_scores.dim() != 2:
        raise ValueError(f"page_scores must be [n, P], got {tuple(page_scores.shape)}")
    _check(page_scores[None], context_lens, slots, lists, scratch)
    rows, width = page_scores.shape
    share = lists.ranked.shape[1]
    longest = min(lists.config.budget_pages(width), width)
    if lists.own_share < 1.0 and longest > share:
        raise ValueError(f"lists of {longest} pages do not fit into {share}")
    if not page_scores.numel():
        return
    block = row_block(width)
    _select_shared_kernel[(rows,)](
        page_scores,
        context_lens,
        slots,
        lists.ranked,
        lists.ranked_counts,
        lists.totals,
        lists.built_for,
        scratch,
        width,
        page_scores.stride(0),
        share,
        **selection_constants(lists.config),
        BLOCK=block,
        MINE=_mine(share),
        OTHERS=_OTHERS,
        num_warps=row_warps(block),
        maxnreg=ROW_REGISTERS,
    )


def select_own(
    page_scores: Tensor, context_lens: Tensor, slots: Tensor, lists: LayerLists, scratch: Tensor
) -> None:
    """:meth:`LayerLists.set_own`; of equal scores the lowest page is the better one.

    Args:
        page_scores: ``[num_lists, n, P]`` float32, contiguous in its last dimension, as in
            :func:`select_shared`.
        context_lens, slots, lists, scratch: as there.

    Raises:
        ValueError: arguments that do not fit each other.
    """
    if page_scores.dim() != 3 or page_scores.shape[0] != lists.num_lists:
        raise ValueError(
            f"page_scores must be [{lists.num_lists}, n, P], got {tuple(page_scores.shape)}"
        )
    _check(page_scores, context_lens, slots, lists, scratch)
    if not page_scores.numel():
        return
    _, rows, width = page_scores.shape
    block, share = row_block(width), lists.own.shape[2]
    _select_own_kernel[(rows, lists.num_lists)](
        page_scores,
        context_lens,
        slots,
        lists.own,
        lists.own_counts,
        scratch,
        width,
        page_scores.stride(0),
        page_scores.stride(1),
        lists.own.stride(0),
        share,
        **selection_constants(lists.config),
        OWN_SHARE=lists.own_share,
        BLOCK=block,
        MINE=_mine(share),
        OTHERS=_OTHERS,
        num_warps=row_warps(block),
        maxnreg=ROW_REGISTERS,
    )


def _mine(width: int) -> int:
    return min(max(triton.next_power_of_2(max(width, 1)), 16), _MINE)


def _check(
    page_scores: Tensor, context_lens: Tensor, slots: Tensor, lists: LayerLists, scratch: Tensor
) -> None:
    rows, width = page_scores.shape[1:]
    if page_scores.dtype != torch.float32 or page_scores.stride(2) != 1:
        raise ValueError("page_scores must be float32 with contiguous rows")
    check_rows(rows, context_lens=context_lens, slots=slots)
    if width > MAX_PAGES:
        raise ValueError(f"rows of {width} pages; at most {MAX_PAGES} are supported")
    if scratch.dtype != torch.int32 or scratch.numel() < scratch_size(lists, rows):
        raise ValueError(f"scratch must hold {scratch_size(lists, rows)} int32")


@triton.jit
def store_ranked(
    scores,
    chosen,
    out,
    count,
    num_pages,
    SINK: tl.constexpr,
    LAST: tl.constexpr,
    MINE: tl.constexpr,
    OTHERS: tl.constexpr,
):
    """Write ``count`` chosen pages best first; sink and last pages count as the best ones.

    The chosen pages were written by other threads of the program.
    """
    tl.debug_barrier()
    for start in range(0, count, MINE):
        place = start + tl.arange(0, MINE)
        real = place < count
        page = tl.load(chosen + place, mask=real, other=0)
        key = _key_of(scores, page, real, num_pages, SINK, LAST)
        better = tl.zeros([MINE], dtype=tl.int32)
        for first in range(0, count, OTHERS):
            other = first + tl.arange(0, OTHERS)
            there = other < count
            rival = tl.load(chosen + other, mask=there, other=0)
            rival_key = _key_of(scores, rival, there, num_pages, SINK, LAST)
            wins = rival_key[None, :] > key[:, None]
            ties = rival_key[None, :] == key[:, None]
            wins = wins | (ties & (rival[None, :] < page[:, None]))
            better += tl.sum((wins & there[None, :]).to(tl.int32), axis=1)
        tl.store(out + better, page, mask=real)


@triton.jit
def _key_of(scores, page, real, num_pages, SINK: tl.constexpr, LAST: tl.constexpr):
    """int32 that sorts as pages rank."""
    key = ordered_bits(tl.load(scores + page, mask=real, other=0.0))
    # No finite score has the greatest key.
    return tl.where((page < SINK) | (page >= num_pages - LAST), 2147483647, key)


@triton.jit
def round_half_even(value):
    """float64 to the nearest int32, as ``torch.round`` does; not for negative values."""
    down = tl.floor(value)
    rest = value - down
    whole = down.to(tl.int32)
    odd = whole % 2 == 1
    return whole + ((rest > 0.5) | ((rest == 0.5) & odd)).to(tl.int32)


@triton.jit
def _select_shared_kernel(
    page_scores,
    context_lens,
    slots,
    ranked,
    ranked_counts,
    totals,
    built_for,
    scratch,
    width,
    stride_scores,
    list_width,
    PAGE: tl.constexpr,
    MIN_PAGES: tl.constexpr,
    RATIO: tl.constexpr,
    SLACK: tl.constexpr,
    SINK: tl.constexpr,
    LAST: tl.constexpr,
    BLOCK: tl.constexpr,
    MINE: tl.constexpr,
    OTHERS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    length = tl.load(context_lens + row).to(tl.int32)
    if slot >= 0:
        scores = page_scores + row * stride_scores
        chosen = scratch + row * list_width
        num_pages = tl.minimum((length + PAGE - 1) // PAGE, width)
        total = tl.minimum(budget_of(num_pages, MIN_PAGES, RATIO, SLACK), num_pages)
        # Sink and last pages come first: a narrow list holds them alone.
        count = tl.minimum(total, list_width)
        store_fitting(scores, chosen, num_pages, count, SINK, LAST, BLOCK, True)
        out = ranked + slot * list_width
        store_ranked(scores, chosen, out, count, num_pages, SINK, LAST, MINE, OTHERS)
        tl.store(ranked_counts + slot, count)
        tl.store(totals + slot, total)
        tl.store(built_for + slot, length)


@triton.jit
def _select_own_kernel(
    page_scores,
    context_lens,
    slots,
    own,
    own_counts,
    scratch,
    width,
    stride_list,
    stride_scores,
    stride_own,
    own_width,
    PAGE: tl.constexpr,
    MIN_PAGES: tl.constexpr,
    RATIO: tl.constexpr,
    SLACK: tl.constexpr,
    SINK: tl.constexpr,
    LAST: tl.constexpr,
    OWN_SHARE: tl.constexpr,
    BLOCK: tl.constexpr,
    MINE: tl.constexpr,
    OTHERS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    number = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    length = tl.load(context_lens + row).to(tl.int32)
    if slot >= 0:
        scores = page_scores + number * stride_list + row * stride_scores
        chosen = scratch + (number * tl.num_programs(0) + row) * own_width
        num_pages = tl.minimum((length + PAGE - 1) // PAGE, width)
        spare = budget_of(num_pages, MIN_PAGES, RATIO, SLACK) - SINK - LAST
        # float64 as on the host.
        count = round_half_even(spare.to(tl.float64) * OWN_SHARE)
        count = tl.minimum(count, tl.minimum(own_width, free_pages(num_pages, SINK, LAST)))
        store_fitting(scores, chosen, num_pages, count, SINK, LAST, BLOCK, False)
        out = own + slot * stride_own + number * own_width
        store_ranked(scores, chosen, out, count, num_pages, SINK, LAST, MINE, OTHERS)
        if number == 0:
            tl.store(own_counts + slot, count)
