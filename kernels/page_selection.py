"""Choosing the pages of sparse contexts on the device: sink pages, last pages, and the best scoring
pages in between, written to the page lists in ascending order without a sort.

The score of the last page that fits the budget is found by a search over the bits of the scores,
with the row held in registers; a prefix sum over the chosen pages then gives each its place.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from aspire_sglang.context.page_lists import PageLists
from aspire_sglang.context.selection import _CEIL_SLACK, SelectionConfig

MAX_PAGES = 1 << 16

ROW_REGISTERS = 128
"""Registers per thread at most: the code for the longest rows must not halve the number of short
rows that a multiprocessor holds."""


def select_pages(
    page_scores: Tensor, context_lens: Tensor, slots: Tensor, lists: PageLists
) -> None:
    """Make new page lists, as :func:`aspire_sglang.context.selection.select_pages` followed by
    :meth:`PageLists.set` would; of equal scores the lowest page wins.

    Args:
        page_scores: ``[n, P]`` float32; entries past a row's last page are ignored, NaN counts as
            the lowest score.
        context_lens: ``[n]`` int tokens per context.
        slots: ``[n]`` int slot of the page lists per row, distinct; negative rows are padding and
            inert.
        lists: the state to write to. A slot's list is padded with -1.

    Raises:
        ValueError: arguments that do not fit each other, or lists that could be too narrow.
    """
    check_selection(page_scores, context_lens, slots, lists)
    if not page_scores.numel():
        return
    block = row_block(page_scores.shape[1])
    _select_pages_kernel[(page_scores.shape[0],)](
        page_scores,
        context_lens,
        slots,
        lists.pages,
        lists.counts,
        lists.built_for,
        page_scores.shape[1],
        page_scores.stride(0),
        lists.pages.stride(0),
        lists.pages.shape[1],
        **selection_constants(lists.config),
        BLOCK=block,
        LIST_BLOCK=triton.next_power_of_2(lists.pages.shape[1]),
        num_warps=row_warps(block),
        maxnreg=ROW_REGISTERS,
    )


def check_selection(
    page_scores: Tensor, context_lens: Tensor, slots: Tensor, lists: PageLists
) -> None:
    """
    Raises:
        ValueError: see :func:`select_pages`.
    """
    if page_scores.dim() != 2 or page_scores.dtype != torch.float32:
        raise ValueError(f"page_scores must be [n, P] float32, got {tuple(page_scores.shape)}")
    if page_scores.stride(1) != 1:
        raise ValueError("rows of page_scores must be contiguous")
    check_rows(page_scores.shape[0], context_lens=context_lens, slots=slots)
    width = page_scores.shape[1]
    if width > MAX_PAGES:
        raise ValueError(f"rows of {width} pages; at most {MAX_PAGES} are supported")
    longest = min(lists.config.budget_pages(width), width)
    if longest > lists.pages.shape[1]:
        raise ValueError(f"lists of {longest} pages do not fit into {lists.pages.shape[1]}")


def check_rows(count: int, **tensors: Tensor) -> None:
    """
    Raises:
        ValueError: if a tensor is not ``[count]``, contiguous and of whole numbers.
    """
    for name, tensor in tensors.items():
        if tensor.shape != (count,) or not tensor.is_contiguous() or tensor.is_floating_point():
            raise ValueError(f"{name} must be [{count}] contiguous int, got {tuple(tensor.shape)}")


def row_block(pages: int) -> int:
    """Block of one program per row of ``pages`` pages."""
    return max(triton.next_power_of_2(pages), 32)


def row_warps(block: int) -> int:
    """Warps of one program per row, measured on an H200."""
    if block <= 1024:
        return 4
    return 8 if block <= 16_384 else 16


def selection_constants(config: SelectionConfig) -> dict[str, int | float]:
    """The configuration as compile-time arguments of the kernels."""
    return {
        "PAGE": config.page_size,
        "MIN_PAGES": config.min_pages,
        "RATIO": config.ratio,
        "SLACK": _CEIL_SLACK,
        "SINK": config.sink_pages,
        "LAST": config.last_pages,
    }


@triton.jit
def budget_of(num_pages, MIN_PAGES: tl.constexpr, RATIO: tl.constexpr, SLACK: tl.constexpr):
    """``SelectionConfig.budget_pages`` of a context of ``num_pages`` pages."""
    # float64 as on the host: a float32 product would round some budgets to another page.
    share = tl.ceil(num_pages.to(tl.float64) * RATIO - SLACK)
    return tl.maximum(share.to(tl.int32), MIN_PAGES)


@triton.jit
def ordered_bits(score):
    """int32 that sorts as the score does; NaN and infinities count as the extreme finite values, so
    the result is never the least int32."""
    greatest: tl.constexpr = 3.4028234663852886e38
    score = tl.where(score == score, score, -greatest)
    score = tl.minimum(tl.maximum(score, -greatest), greatest)
    # Negative zero would sort below zero.
    score = tl.where(score == 0.0, 0.0, score)
    bits = score.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def threshold_of(key, need):
    """Greatest ``t`` that at least ``need`` keys reach (``>=``), or a lower one that the same keys
    reach. No key reaches the result if ``need`` is 0.

    Two bits per round, from the top: the three candidates are counted in one sum, in fields of 21
    bits.
    """
    low: tl.constexpr = -2147483648
    offset = tl.zeros([], dtype=tl.int64)
    reached = tl.full([], -1, dtype=tl.int32)
    shift = tl.full([], 30, dtype=tl.int32)
    while (shift >= 0) & (reached != need):
        unit = tl.full([], 1, dtype=tl.int64) << shift.to(tl.int64)
        base = offset + low
        above_1 = (key >= (base + unit).to(tl.int32)).to(tl.int64)
        above_2 = (key >= (base + 2 * unit).to(tl.int32)).to(tl.int64)
        above_3 = (key >= (base + 3 * unit).to(tl.int32)).to(tl.int64)
        counts = tl.sum(above_1 + (above_2 << 21) + (above_3 << 42), axis=0)
        count_1 = (counts & 0x1FFFFF).to(tl.int32)
        count_2 = ((counts >> 21) & 0x1FFFFF).to(tl.int32)
        count_3 = (counts >> 42).to(tl.int32)
        digit = (count_1 >= need).to(tl.int32) + (count_2 >= need).to(tl.int32)
        digit += (count_3 >= need).to(tl.int32)
        reached = tl.where(digit == 1, count_1, reached)
        reached = tl.where(digit == 2, count_2, reached)
        reached = tl.where(digit == 3, count_3, reached)
        offset += digit.to(tl.int64) * unit
        shift -= 2
    # No finite score has the greatest key.
    return tl.where(need == 0, 2147483647, offset + low).to(tl.int32)


@triton.jit
def free_pages(num_pages, SINK: tl.constexpr, LAST: tl.constexpr):
    """Pages of a context that are neither sink nor last pages."""
    return tl.maximum(tl.maximum(num_pages - LAST, 0) - SINK, 0)


@triton.jit
def store_chosen(
    scores, pages, num_pages, budget, SINK: tl.constexpr, LAST: tl.constexpr, BLOCK: tl.constexpr,
    FORCED: tl.constexpr,
):  # fmt: skip
    """Write the chosen pages of a row of at most ``BLOCK`` pages, in ascending order: ``budget``
    pages, sink and last ones among them, or with ``FORCED`` false so many of the others."""
    page = tl.arange(0, BLOCK)
    exists = page < num_pages
    free = exists & (page >= SINK) & (page < num_pages - LAST)
    if FORCED:
        count = tl.minimum(budget, num_pages)
        forced = exists & (free == 0)
        need = count - (num_pages - free_pages(num_pages, SINK, LAST))
    else:
        count = budget
        forced = page < 0
        need = count
    key = ordered_bits(tl.load(scores + page, mask=exists, other=0.0))
    key = tl.where(free, key, -2147483648)
    threshold = threshold_of(key, need)
    sure = forced | (key > threshold)
    tied = free & (key == threshold)
    # Both running counts in one scan: sure pages in the low half, tied ones in the high half.
    running = tl.cumsum(sure.to(tl.int64) + (tied.to(tl.int64) << 32), axis=0)
    sure_before = (running & 0xFFFFFFFF).to(tl.int32)
    tied_before = (running >> 32).to(tl.int32)
    room = count - tl.sum(sure.to(tl.int32), axis=0)
    chosen = sure | (tied & (tied_before <= room))
    place = sure_before + tl.minimum(tied_before, room) - 1
    tl.store(pages + place, page, mask=chosen)


@triton.jit
def store_fitting(
    scores, pages, num_pages, budget, SINK: tl.constexpr, LAST: tl.constexpr, BLOCK: tl.constexpr,
    FORCED: tl.constexpr,
):  # fmt: skip
    """:func:`store_chosen` of a row that may be far shorter than the longest."""
    # A row is as wide as the server's longest context; most contexts are far shorter.
    if BLOCK <= 1024:
        store_chosen(scores, pages, num_pages, budget, SINK, LAST, BLOCK, FORCED)
    else:
        if num_pages <= 1024:
            store_chosen(scores, pages, num_pages, budget, SINK, LAST, 1024, FORCED)
        else:
            if BLOCK <= 4096:
                store_chosen(scores, pages, num_pages, budget, SINK, LAST, BLOCK, FORCED)
            else:
                if num_pages <= 4096:
                    store_chosen(scores, pages, num_pages, budget, SINK, LAST, 4096, FORCED)
                else:
                    store_chosen(scores, pages, num_pages, budget, SINK, LAST, BLOCK, FORCED)


@triton.jit
def store_list(
    scores,
    length,
    pages,
    counts,
    built_for,
    slot,
    width,
    list_width,
    PAGE: tl.constexpr,
    MIN_PAGES: tl.constexpr,
    RATIO: tl.constexpr,
    SLACK: tl.constexpr,
    SINK: tl.constexpr,
    LAST: tl.constexpr,
    BLOCK: tl.constexpr,
    LIST_BLOCK: tl.constexpr,
):
    """Choose the pages of one row and write its list; returns the number of pages."""
    num_pages = tl.minimum((length + PAGE - 1) // PAGE, width)
    budget = budget_of(num_pages, MIN_PAGES, RATIO, SLACK)
    store_fitting(scores, pages, num_pages, budget, SINK, LAST, BLOCK, True)
    count = tl.minimum(budget, num_pages)
    column = tl.arange(0, LIST_BLOCK)
    tl.store(pages + column, -1, mask=(column >= count) & (column < list_width))
    tl.store(counts + slot, count)
    tl.store(built_for + slot, length)
    return count


@triton.jit
def _select_pages_kernel(
    page_scores,
    context_lens,
    slots,
    pages,
    counts,
    built_for,
    width,
    stride_scores,
    stride_pages,
    list_width,
    PAGE: tl.constexpr,
    MIN_PAGES: tl.constexpr,
    RATIO: tl.constexpr,
    SLACK: tl.constexpr,
    SINK: tl.constexpr,
    LAST: tl.constexpr,
    BLOCK: tl.constexpr,
    LIST_BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    length = tl.load(context_lens + row).to(tl.int32)
    if slot >= 0:
        store_list(
            page_scores + row * stride_scores,
            length,
            pages + slot * stride_pages,
            counts,
            built_for,
            slot,
            width,
            list_width,
            PAGE,
            MIN_PAGES,
            RATIO,
            SLACK,
            SINK,
            LAST,
            BLOCK,
            LIST_BLOCK,
        )
