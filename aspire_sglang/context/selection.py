"""Choosing the pages a draft row may read, from attention scores.

The sparse context of a request is a set of whole pages: the first ones (attention sinks), the
last ones (recency), and the best scoring pages in between. One list serves all layers and heads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Reduction = Literal["max", "mean", "sum"]

# 0.07 * 100 is 7.000000000000001 in floating point and must still be 7 pages.
_CEIL_SLACK = 1e-9


@dataclass(frozen=True)
class SelectionConfig:
    """Size and shape of the sparse context.

    Attributes:
        page_size: tokens per page.
        min_pages: least number of pages read, where the context has that many.
        ratio: share of the context's pages read in long contexts.
        sink_pages: first pages, always read.
        last_pages: last pages, always read; at least 1, because a query reads its own page.
        reduction: how the attention probabilities of the query heads are merged per token.

    The budget ``max(min_pages, ceil(ratio * pages))`` counts *all* pages of a list, sink and last
    pages included.

    Raises:
        ValueError: if a field is out of range or the budget could not hold sink and last pages.
    """

    page_size: int = 16
    min_pages: int = 32
    ratio: float = 0.07
    sink_pages: int = 1
    last_pages: int = 8
    reduction: Reduction = "max"

    def __post_init__(self) -> None:
        if self.page_size < 1:
            raise ValueError(f"page_size must be at least 1, got {self.page_size}")
        if self.sink_pages < 0:
            raise ValueError(f"sink_pages must not be negative, got {self.sink_pages}")
        if self.last_pages < 1:
            raise ValueError(
                f"last_pages must be at least 1 (a query reads its own page), got {self.last_pages}"
            )
        if self.min_pages < self.sink_pages + self.last_pages:
            raise ValueError(
                f"min_pages ({self.min_pages}) counts the sink and last pages too and must be at "
                f"least sink_pages + last_pages ({self.sink_pages} + {self.last_pages})"
            )
        if not 0.0 <= self.ratio <= 1.0:
            raise ValueError(f"ratio must lie in [0, 1], got {self.ratio}")
        if self.reduction not in ("max", "mean", "sum"):
            raise ValueError(f"reduction must be max, mean or sum, got {self.reduction!r}")

    def num_pages(self, tokens: int) -> int:
        """Pages that ``tokens`` tokens occupy; the last one may be partial."""
        return -(-tokens // self.page_size)

    def budget_pages(self, num_pages: int) -> int:
        """Most pages in the list of a context of ``num_pages`` pages, sink and last included."""
        return max(self.min_pages, math.ceil(self.ratio * num_pages - _CEIL_SLACK))

    def budgets_of(self, num_pages: NDArray[np.int64]) -> NDArray[np.int64]:
        """:meth:`budget_pages` for an array of any shape."""
        share = np.ceil(num_pages * self.ratio - _CEIL_SLACK).astype(np.int64)
        return np.maximum(share, self.min_pages)

    def budgets(self, num_pages: Tensor) -> Tensor:
        """:meth:`budget_pages` for an int tensor of any shape; int64."""
        share = (num_pages.double() * self.ratio - _CEIL_SLACK).ceil().long()
        return share.clamp(min=self.min_pages)


@dataclass(frozen=True)
class PageSelection:
    """Chosen pages of ``n`` contexts.

    Attributes:
        pages: ``[n, K]`` int64 page numbers within the context, distinct, padded with -1 at the
            end; ascending, or from :func:`rank_pages` best first.
        counts: ``[n]`` int64 pages per row.
        context_lens: ``[n]`` int64 tokens in the context when it was scored.
    """

    pages: Tensor
    counts: Tensor
    context_lens: Tensor


def token_scores_to_page_scores(
    probs: Tensor, page_size: int, reduction: Reduction = "max"
) -> Tensor:
    """Merge heads per token, then sum inside each page.

    Args:
        probs: ``[..., H, N]`` float attention probabilities of a query over ``N`` tokens.
        page_size: tokens per page.
        reduction: merge over the ``H`` heads.

    Returns:
        ``[..., ceil(N / page_size)]`` float32.

    Raises:
        ValueError: if the reduction is unknown.
    """
    if reduction == "max":
        merged = probs.amax(dim=-2).float()
    elif reduction == "sum":
        merged = probs.sum(dim=-2, dtype=torch.float32)
    elif reduction == "mean":
        merged = probs.mean(dim=-2, dtype=torch.float32)
    else:
        raise ValueError(f"reduction must be max, mean or sum, got {reduction!r}")
    merged = torch.nn.functional.pad(merged, (0, -merged.shape[-1] % page_size))
    return merged.unflatten(-1, (-1, page_size)).sum(dim=-1)


def pages_of(context_lens: Tensor, page_size: int) -> Tensor:
    """``[n]`` int64 pages that contexts of so many tokens occupy."""
    return (context_lens.long() + page_size - 1).div(page_size, rounding_mode="floor")


def rank_pages(page_scores: Tensor, context_lens: Tensor, config: SelectionConfig) -> PageSelection:
    """Sink pages, last pages and the best scoring pages, up to the budget, best first.

    As :func:`select_pages`, but in order of rank: sink and last pages, then by falling score.

    Raises:
        ValueError: if the shapes do not fit.
    """
    if page_scores.dim() != 2 or context_lens.shape != page_scores.shape[:1]:
        raise ValueError(
            f"page_scores {tuple(page_scores.shape)} and context_lens "
            f"{tuple(context_lens.shape)} must be [n, P] and [n]"
        )
    width = page_scores.shape[1]
    existing = pages_of(context_lens, config.page_size)
    num_pages = existing.view(-1, 1)
    page = torch.arange(width, device=page_scores.device)
    # Valid pages stay finite, so that they rank above every page that does not exist.
    low, high = torch.finfo(torch.float32).min, torch.finfo(torch.float32).max
    scores = torch.nan_to_num(page_scores.float(), nan=low, posinf=high, neginf=low)
    forced = (page < config.sink_pages) | (page >= num_pages - config.last_pages)
    scores = scores.masked_fill(forced, torch.inf).masked_fill(page >= num_pages, -torch.inf)

    keep = min(config.budget_pages(width), width)
    best = scores.topk(keep, dim=-1).indices
    counts = torch.minimum(config.budgets(existing), existing)
    surplus = torch.arange(keep, device=page_scores.device) >= counts.view(-1, 1)
    return PageSelection(best.masked_fill(surplus, -1), counts, context_lens.long())


def select_pages(
    page_scores: Tensor, context_lens: Tensor, config: SelectionConfig
) -> PageSelection:
    """Sink pages, last pages and the best scoring pages, up to the budget.

    Row ``i`` gets exactly ``min(budget, pages)`` distinct pages; a budget that covers the context
    gives all of them. Runs without a device sync.

    Args:
        page_scores: ``[n, P]`` float; entries past a row's last page are ignored, NaN counts as the
            lowest score.
        context_lens: ``[n]`` int tokens per context, at most ``P * page_size``.
        config: budget and forced pages.

    Returns:
        The lists, ``K = min(budget of P pages, P)`` wide.

    Raises:
        ValueError: if the shapes do not fit.
    """
    ranked = rank_pages(page_scores, context_lens, config)
    surplus = ranked.pages < 0
    pages = ranked.pages.masked_fill(surplus, page_scores.shape[1]).sort(dim=-1).values
    return PageSelection(pages.masked_fill(surplus, -1), ranked.counts, ranked.context_lens)
