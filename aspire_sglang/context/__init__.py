"""Sparse contexts: which pages a draft row reads. Plain tensors, no serving code."""

from aspire_sglang.context.page_lists import PageLists
from aspire_sglang.context.selection import (
    PageSelection,
    SelectionConfig,
    select_pages,
    token_scores_to_page_scores,
)

__all__ = [
    "PageLists",
    "PageSelection",
    "SelectionConfig",
    "select_pages",
    "token_scores_to_page_scores",
]
