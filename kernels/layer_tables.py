"""Page tables of a mixed batch whose draft rows read another list at every layer, or at every group
of layers: the tables of all lists in one launch.

A row is equally long in all of them, so one schedule of the attention serves every layer. A draft
row lists its sink pages, its own pages, the shared ones and then its tail, which ends with the
query's own page; the pages before the tail are in order of rank, not of position. Nothing is lost
by that: the query sees them all, and keys carry their position.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from aspire_sglang.context.layer_lists import LayerLists
from aspire_sglang.kernels.page_selection import budget_of, check_rows, selection_constants
from aspire_sglang.kernels.page_tables import check_tables, write_full_row

_BLOCK = 1024
_TAIL = 256
_PROGRAMS = 8192
_OWN = 16


def build_layer_tables(
    req_to_token: Tensor,
    slots: Tensor,
    context_lens: Tensor,
    draft: Tensor,
    lists: LayerLists,
    tables: Tensor,
    cache_seqlens: Tensor,
    *,
    kv_page_size: int = 1,
    draft_lists: range | None = None,
    full_rows: bool = True,
) -> None:
    """Write the page table of every row by several lists, and the rows' lengths.

    A draft row reads what :meth:`LayerLists.draft_pages` says for a query at its last position; any
    other row reads its whole context. Table entries past a row's length are left alone, and so is
    what is not asked for.

    Args:
        req_to_token: ``[requests, width]`` int32 KV slot of each position; a KV page's slots are
            consecutive and start at a multiple of the page size.
        slots: ``[n]`` int row of the request table and of the lists; negative rows are padding, of
            length 0.
        context_lens: ``[n]`` int positions up to and including the row's last query.
        draft: ``[n]`` bool or int, whether the row reads its sparse context.
        lists: page lists of all slots; their page size is a multiple of ``kv_page_size``.
        tables: ``[num_lists, n, W]`` int32 with room for ``width`` tokens: KV pages, which are
            slots where ``kv_page_size`` is 1.
        cache_seqlens: ``[n]`` int32 tokens that a row reads, by any list.
        kv_page_size: tokens per page of the KV pool.
        draft_lists: lists by which tables of draft rows are written, all if None; consecutive. If
            empty, draft rows get no length either.
        full_rows: write the tables of the other rows, by all lists, and their lengths.

    Raises:
        ValueError: arguments that do not fit each other.
    """
    count, wanted = slots.shape[0], range(lists.num_lists) if draft_lists is None else draft_lists
    check_rows(count, slots=slots, context_lens=context_lens, draft=draft)
    if tables.dim() != 3 or tables.shape[0] != lists.num_lists:
        raise ValueError(f"tables must be [{lists.num_lists}, n, W], got {tuple(tables.shape)}")
    check_tables(req_to_token, tables[0], cache_seqlens, count, lists.config, kv_page_size)
    if wanted.step != 1 or wanted.start < 0 or wanted.stop > lists.num_lists:
        raise ValueError(f"{wanted} are not lists among {lists.num_lists}")
    if not count or not (full_rows or wanted):
        return
    # Others than draft rows need a program per list anyway.
    first, number = (0, lists.num_lists) if full_rows else (wanted.start, len(wanted))
    splits = max(1, min(_PROGRAMS // (count * number), triton.cdiv(tables.shape[2], _BLOCK)))
    parts = lists.config.page_size // kv_page_size
    _layer_tables_kernel[(count, number, splits if full_rows else 1)](
        req_to_token,
        slots,
        context_lens,
        draft,
        lists.own,
        lists.own_counts,
        lists.ranked,
        lists.ranked_counts,
        lists.totals,
        lists.built_for,
        tables,
        cache_seqlens,
        req_to_token.stride(0),
        lists.own.stride(0),
        lists.own.stride(1),
        lists.ranked.stride(0),
        tables.stride(0),
        tables.stride(1),
        first,
        wanted.start,
        wanted.stop,
        **selection_constants(lists.config),
        KV_PAGE=kv_page_size,
        FULL_ROWS=full_rows,
        BLOCK=_BLOCK,
        TAIL=_TAIL,
        CHUNK=max(32, min(256, _BLOCK // parts)),
        OWN=_OWN,
        SINKS=triton.next_power_of_2(max(lists.config.sink_pages, 1)),
        num_warps=4,
    )


@triton.jit
def _write_pages(req_row, table_row, page, place, taken, PAGE: tl.constexpr, KV_PAGE: tl.constexpr):
    """Put whole pages at their places in a row's table."""
    parts: tl.constexpr = PAGE // KV_PAGE
    part = tl.arange(0, parts)[None, :]
    mask = taken[:, None] & (part < parts)
    slot = tl.load(req_row + page[:, None] * PAGE + part * KV_PAGE, mask=mask, other=0)
    tl.store(table_row + place[:, None] * parts + part, slot // KV_PAGE, mask=mask)


@triton.jit
def _write_fitting(
    req_row, table_row, page, fits, listed, heads, PAGE: tl.constexpr, KV_PAGE: tl.constexpr
):
    """Put the pages that fit behind the ``listed`` ones, up to ``heads``; returns how many there
    are then."""
    place = listed + tl.cumsum(fits.to(tl.int32), axis=0) - 1
    _write_pages(req_row, table_row, page, place, fits & (place < heads), PAGE, KV_PAGE)
    return tl.minimum(listed + tl.sum(fits.to(tl.int32), axis=0), heads)


@triton.jit
def _is_listed(page, pages, count, WIDTH: tl.constexpr):
    """Whether each of some pages is among the first ``count`` of a list."""
    found = page < 0
    for start in range(0, count, WIDTH):
        column = start + tl.arange(0, WIDTH)
        other = tl.load(pages + column, mask=column < count, other=-1)
        same = (page[:, None] == other[None, :]).to(tl.int32)
        found = found | (tl.max(same, axis=1) > 0)
    return found


@triton.jit
def _write_draft_row(
    req_row, own, own_count, ranked, ranked_count, table_row, heads, tail, length,
    SINK: tl.constexpr, PAGE: tl.constexpr, KV_PAGE: tl.constexpr, TAIL: tl.constexpr,
    CHUNK: tl.constexpr, OWN: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """``heads`` pages before the tail, then the tail, ``length`` KV pages in all."""
    listed = tl.minimum(tail, SINK)
    if SINK > 0:
        sink = tl.arange(0, SINKS)
        _write_pages(req_row, table_row, sink, sink, sink < listed, PAGE, KV_PAGE)
    start = tl.zeros([], dtype=tl.int32)
    while (start < own_count) & (listed < heads):
        column = start + tl.arange(0, CHUNK)
        page = tl.load(own + column, mask=column < own_count, other=0)
        fits = (column < own_count) & (page < tail)
        listed = _write_fitting(req_row, table_row, page, fits, listed, heads, PAGE, KV_PAGE)
        start += CHUNK
    # While there is room all own pages before the tail are listed, so none may come again.
    start = tl.zeros([], dtype=tl.int32)
    while (start < ranked_count) & (listed < heads):
        column = start + tl.arange(0, CHUNK)
        page = tl.load(ranked + column, mask=column < ranked_count, other=0)
        fits = (column < ranked_count) & (page < tail) & (page >= SINK)
        fits = fits & (_is_listed(page, own, own_count, OWN) == 0)
        listed = _write_fitting(req_row, table_row, page, fits, listed, heads, PAGE, KV_PAGE)
        start += CHUNK
    # A context that shrank may have lost some of its listed pages: the most recent stand in. Of the
    # last ``heads`` pages before the tail enough are free.
    start = tl.zeros([], dtype=tl.int32)
    while (start < heads) & (listed < heads):
        column = start + tl.arange(0, CHUNK)
        page = tail - 1 - column
        fits = (column < heads) & (page >= SINK)
        fits = fits & (_is_listed(page, own, own_count, OWN) == 0)
        fits = fits & (_is_listed(page, ranked, ranked_count, OWN) == 0)
        listed = _write_fitting(req_row, table_row, page, fits, listed, heads, PAGE, KV_PAGE)
        start += CHUNK
    before = heads * (PAGE // KV_PAGE)
    for first in range(before, length, TAIL):
        column = first + tl.arange(0, TAIL)
        inside = column < length
        position = tail * PAGE + (column - before) * KV_PAGE
        slot = tl.load(req_row + position, mask=inside, other=0)
        tl.store(table_row + column, slot // KV_PAGE, mask=inside)


@triton.jit
def _layer_tables_kernel(
    req_to_token,
    slots,
    context_lens,
    draft,
    own,
    own_counts,
    ranked,
    ranked_counts,
    totals,
    built_for,
    tables,
    cache_seqlens,
    stride_req,
    stride_own,
    stride_own_list,
    stride_ranked,
    stride_list,
    stride_table,
    first_list,
    draft_begin,
    draft_end,
    PAGE: tl.constexpr,
    MIN_PAGES: tl.constexpr,
    RATIO: tl.constexpr,
    SLACK: tl.constexpr,
    SINK: tl.constexpr,
    LAST: tl.constexpr,
    KV_PAGE: tl.constexpr,
    FULL_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    TAIL: tl.constexpr,
    CHUNK: tl.constexpr,
    OWN: tl.constexpr,
    SINKS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    number = first_list + tl.program_id(1)
    split = tl.program_id(2)
    slot = tl.load(slots + row).to(tl.int64)
    length = tl.load(context_lens + row).to(tl.int32)
    table_row = tables + number.to(tl.int64) * stride_list + row * stride_table
    req_row = req_to_token + slot * stride_req
    if slot < 0:
        if FULL_ROWS:
            tl.store(cache_seqlens + row, 0, mask=(split == 0) & (number == 0))
    else:
        if tl.load(draft + row) == 0:
            if FULL_ROWS:
                if (split == 0) & (number == 0):
                    tl.store(cache_seqlens + row, length)
                step = tl.num_programs(2) * BLOCK
                write_full_row(req_row, table_row, length, split * BLOCK, step, KV_PAGE, BLOCK)
        else:
            if (split == 0) & (number >= draft_begin) & (number < draft_end):
                num_pages = (length + PAGE - 1) // PAGE
                budget = budget_of(num_pages, MIN_PAGES, RATIO, SLACK)
                total = tl.load(totals + slot).to(tl.int32)
                own_count = tl.load(own_counts + slot).to(tl.int32)
                ranked_count = tl.load(ranked_counts + slot).to(tl.int32)
                ranked_row = ranked + slot * stride_ranked
                # Text newer than the list was never scored, so it is always read.
                unscored = tl.load(built_for + slot).to(tl.int32) // PAGE
                recent = tl.minimum(num_pages - LAST, unscored)
                tail = tl.where(total > 0, recent, num_pages - (budget - SINK))
                tail = tl.where(num_pages <= budget, 0, tl.maximum(tail, 0))
                in_tail = tl.zeros([], dtype=tl.int32)
                for start in range(0, ranked_count, CHUNK):
                    column = start + tl.arange(0, CHUNK)
                    page = tl.load(ranked_row + column, mask=column < ranked_count, other=-1)
                    in_tail += tl.sum(((page >= tail) & (page >= 0)).to(tl.int32), axis=0)
                heads = tl.where(total > 0, total - in_tail, SINK)
                heads = tl.minimum(tl.maximum(heads, SINK), tail)
                tokens = (heads + num_pages - tail) * PAGE - (num_pages * PAGE - length)
                if number == draft_begin:
                    tl.store(cache_seqlens + row, tokens)
                _write_draft_row(
                    req_row, own + slot * stride_own + number * stride_own_list, own_count,
                    ranked_row, ranked_count, table_row, heads, tail,
                    (tokens + KV_PAGE - 1) // KV_PAGE,
                    SINK, PAGE, KV_PAGE, TAIL, CHUNK, OWN, SINKS,
                )  # fmt: skip
