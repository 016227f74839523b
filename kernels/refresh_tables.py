"""New page lists and, in the same kernel, the page tables of draft rows that use them at once."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from aspire_sglang.context.page_lists import PageLists
from aspire_sglang.kernels.page_selection import (
    ROW_REGISTERS,
    check_rows,
    check_selection,
    row_block,
    row_warps,
    selection_constants,
    store_list,
)
from aspire_sglang.kernels.page_tables import check_tables, write_draft_row

_BLOCK = 1024


def refresh_tables(
    page_scores: Tensor,
    req_to_token: Tensor,
    slots: Tensor,
    context_lens: Tensor,
    draft: Tensor,
    lists: PageLists,
    table: Tensor,
    cache_seqlens: Tensor,
    *,
    kv_page_size: int = 1,
) -> None:
    """:func:`~aspire_sglang.kernels.page_selection.select_pages` for all rows, then
    :func:`~aspire_sglang.kernels.page_tables.build_tables` for the draft rows among them. Table
    rows and lengths of other rows are left alone.

    Args:
        page_scores: ``[n, P]`` float32; row ``i`` scores the context of row ``i`` of the batch.
        req_to_token, slots, context_lens, draft, lists, table, cache_seqlens, kv_page_size: as in
            the two functions.

    Raises:
        ValueError: arguments that do not fit each other.
    """
    count = slots.shape[0]
    check_selection(page_scores, context_lens, slots, lists)
    check_rows(count, draft=draft)
    check_tables(req_to_token, table, cache_seqlens, count, lists.config, kv_page_size)
    if not page_scores.numel():
        return
    block = row_block(page_scores.shape[1])
    _refresh_tables_kernel[(count,)](
        page_scores,
        req_to_token,
        slots,
        context_lens,
        draft,
        lists.pages,
        lists.counts,
        lists.built_for,
        table,
        cache_seqlens,
        page_scores.shape[1],
        page_scores.stride(0),
        req_to_token.stride(0),
        lists.pages.stride(0),
        table.stride(0),
        lists.pages.shape[1],
        **selection_constants(lists.config),
        KV_PAGE=kv_page_size,
        BLOCK=block,
        TABLE_BLOCK=_BLOCK,
        LIST_BLOCK=triton.next_power_of_2(lists.pages.shape[1]),
        num_warps=row_warps(block),
        maxnreg=ROW_REGISTERS,
    )


@triton.jit
def _refresh_tables_kernel(
    page_scores,
    req_to_token,
    slots,
    context_lens,
    draft,
    pages,
    counts,
    built_for,
    table,
    cache_seqlens,
    width,
    stride_scores,
    stride_req,
    stride_pages,
    stride_table,
    list_width,
    PAGE: tl.constexpr,
    MIN_PAGES: tl.constexpr,
    RATIO: tl.constexpr,
    SLACK: tl.constexpr,
    SINK: tl.constexpr,
    LAST: tl.constexpr,
    KV_PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    TABLE_BLOCK: tl.constexpr,
    LIST_BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    length = tl.load(context_lens + row).to(tl.int32)
    if slot >= 0:
        new_list = pages + slot * stride_pages
        count = store_list(
            page_scores + row * stride_scores,
            length,
            new_list,
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
        if tl.load(draft + row) != 0:
            # A fresh list ends with the query's own page, so it is the row's whole context. Other
            # threads of the program wrote parts of it.
            tl.debug_barrier()
            tokens = count * PAGE - ((length + PAGE - 1) // PAGE * PAGE - length)
            tl.store(cache_seqlens + row, tokens)
            write_draft_row(
                req_to_token + slot * stride_req, new_list, table + row * stride_table,
                count, 0, tokens, 0, TABLE_BLOCK, PAGE, KV_PAGE, TABLE_BLOCK,
            )  # fmt: skip
