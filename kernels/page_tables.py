"""Page tables of a mixed batch: the whole context for full rows, the sparse context for draft rows.

An attention kernel that takes a page table and a length per row reads a draft row as a short
sequence: its pages in ascending order, the last one, the query's own, partial.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from aspire_sglang.context.page_lists import PageLists
from aspire_sglang.context.selection import SelectionConfig
from aspire_sglang.kernels.page_selection import budget_of, check_rows, selection_constants
from aspire_sglang.kernels.vote_rows import check_table

_BLOCK = 1024
_PROGRAMS = 2048


def build_tables(
    req_to_token: Tensor,
    slots: Tensor,
    context_lens: Tensor,
    draft: Tensor,
    lists: PageLists,
    table: Tensor,
    cache_seqlens: Tensor,
    *,
    kv_page_size: int = 1,
    padding_len: int = 0,
) -> None:
    """Write the page table and the length of every row.

    A draft row reads what :meth:`PageLists.draft_pages` says for a query at its last position; any
    other row reads its whole context. Table entries past a row's length are left alone.

    Args:
        req_to_token: ``[requests, width]`` int32 KV slot of each position; a KV page's slots are
            consecutive and start at a multiple of the page size.
        slots: ``[n]`` int row of the request table and of the lists; negative rows are padding.
        context_lens: ``[n]`` int positions up to and including the row's last query.
        draft: ``[n]`` bool or int, whether the row reads its sparse context.
        lists: page lists of all slots; their page size is a multiple of ``kv_page_size``.
        table: ``[n, W]`` int32 with room for ``width`` tokens: KV pages, which are slots where
            ``kv_page_size`` is 1.
        cache_seqlens: ``[n]`` int32 tokens that a row reads.
        kv_page_size: tokens per page of the KV pool.
        padding_len: length of padding rows; a positive one makes them read slot 0.

    Raises:
        ValueError: arguments that do not fit each other.
    """
    count = slots.shape[0]
    check_rows(count, slots=slots, context_lens=context_lens, draft=draft)
    check_tables(req_to_token, table, cache_seqlens, count, lists.config, kv_page_size)
    if not 0 <= padding_len <= kv_page_size:
        raise ValueError(f"padding_len must lie in [0, {kv_page_size}], got {padding_len}")
    if not count:
        return
    splits = max(1, min(_PROGRAMS // count, triton.cdiv(table.shape[1], _BLOCK)))
    _build_tables_kernel[(count, splits)](
        req_to_token,
        slots,
        context_lens,
        draft,
        lists.pages,
        lists.counts,
        lists.built_for,
        table,
        cache_seqlens,
        req_to_token.stride(0),
        lists.pages.stride(0),
        table.stride(0),
        lists.pages.shape[1],
        padding_len,
        **selection_constants(lists.config),
        KV_PAGE=kv_page_size,
        BLOCK=_BLOCK,
        LIST_BLOCK=triton.next_power_of_2(lists.pages.shape[1]),
        num_warps=4,
    )


def check_tables(
    req_to_token: Tensor,
    table: Tensor,
    cache_seqlens: Tensor,
    count: int,
    config: SelectionConfig,
    kv_page_size: int,
) -> None:
    """
    Raises:
        ValueError: see :func:`build_tables`.
    """
    check_table(req_to_token)
    if kv_page_size < 1 or config.page_size % kv_page_size:
        raise ValueError(
            f"page lists of {config.page_size}-token pages cannot name KV pages of {kv_page_size} "
            f"tokens: the lists' page_size must be a multiple of the KV page size"
        )
    if table.dim() != 2 or table.dtype != torch.int32 or table.stride(1) != 1:
        raise ValueError("table must be [n, W] int32 with contiguous rows")
    if table.shape[0] != count or table.shape[1] * kv_page_size < req_to_token.shape[1]:
        raise ValueError(
            f"table {tuple(table.shape)} has no room for {count} rows of {req_to_token.shape[1]} "
            f"tokens in pages of {kv_page_size}"
        )
    if cache_seqlens.shape != (count,) or cache_seqlens.dtype != torch.int32:
        raise ValueError(f"cache_seqlens must be [{count}] int32")


@triton.jit
def write_draft_row(
    req_row, pages, table_row, listed, tail, length, start, step,
    PAGE: tl.constexpr, KV_PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """KV pages of a sparse context: ``listed`` pages of a list, then every page from ``tail`` on,
    ``length`` tokens in all. Writes columns ``start .. start + BLOCK`` and on in steps."""
    parts: tl.constexpr = PAGE // KV_PAGE
    columns = (length + KV_PAGE - 1) // KV_PAGE
    for first in range(start, columns, step):
        column = first + tl.arange(0, BLOCK)
        entry = column // parts
        inside = column < columns
        page = tl.load(pages + entry, mask=inside & (entry < listed), other=0)
        page = tl.where(entry < listed, page, tail + entry - listed)
        position = page * PAGE + (column % parts) * KV_PAGE
        slot = tl.load(req_row + position, mask=inside, other=0)
        tl.store(table_row + column, slot // KV_PAGE, mask=inside)


@triton.jit
def write_full_row(
    req_row, table_row, length, start, step, KV_PAGE: tl.constexpr, BLOCK: tl.constexpr
):
    """KV pages of the first ``length`` tokens; columns as in :func:`write_draft_row`."""
    columns = (length + KV_PAGE - 1) // KV_PAGE
    for first in range(start, columns, step):
        column = first + tl.arange(0, BLOCK)
        inside = column < columns
        slot = tl.load(req_row + column * KV_PAGE, mask=inside, other=0)
        tl.store(table_row + column, slot // KV_PAGE, mask=inside)


@triton.jit
def _build_tables_kernel(
    req_to_token,
    slots,
    context_lens,
    draft,
    pages,
    counts,
    built_for,
    table,
    cache_seqlens,
    stride_req,
    stride_pages,
    stride_table,
    list_width,
    padding_len,
    PAGE: tl.constexpr,
    MIN_PAGES: tl.constexpr,
    RATIO: tl.constexpr,
    SLACK: tl.constexpr,
    SINK: tl.constexpr,
    LAST: tl.constexpr,
    KV_PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    LIST_BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * BLOCK
    step = tl.num_programs(1) * BLOCK
    slot = tl.load(slots + row).to(tl.int64)
    table_row = table + row * stride_table
    if slot < 0:
        if start == 0:
            tl.store(cache_seqlens + row, padding_len)
            if padding_len > 0:
                tl.store(table_row, 0)
    else:
        length = tl.load(context_lens + row).to(tl.int32)
        req_row = req_to_token + slot * stride_req
        if tl.load(draft + row) != 0:
            num_pages = (length + PAGE - 1) // PAGE
            budget = budget_of(num_pages, MIN_PAGES, RATIO, SLACK)
            listed = tl.load(counts + slot).to(tl.int32)
            # Text newer than the list was never scored, so it is always read.
            unscored = tl.load(built_for + slot).to(tl.int32) // PAGE
            recent = tl.minimum(num_pages - LAST, unscored)
            tail = tl.where(listed > 0, recent, num_pages - (budget - SINK))
            tail = tl.where(num_pages <= budget, 0, tl.maximum(tail, 0))
            # A list is ascending: its pages before the tail are its first ones. Without a list
            # the sink pages stand there.
            listed = tl.where(listed > 0, listed, SINK)
            column = tl.arange(0, LIST_BLOCK)
            listed_pages = pages + slot * stride_pages
            valid = column < tl.minimum(listed, list_width)
            page = tl.load(listed_pages + column, mask=valid, other=0)
            kept = tl.sum((valid & (page < tail)).to(tl.int32), axis=0)
            tokens = (kept + num_pages - tail) * PAGE - (num_pages * PAGE - length)
            if start == 0:
                tl.store(cache_seqlens + row, tokens)
            write_draft_row(
                req_row, listed_pages, table_row, kept, tail, tokens, start, step,
                PAGE, KV_PAGE, BLOCK,
            )  # fmt: skip
        else:
            if start == 0:
                tl.store(cache_seqlens + row, length)
            write_full_row(req_row, table_row, length, start, step, KV_PAGE, BLOCK)
