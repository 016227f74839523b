"""A page list per layer: the layer's own pages, filled up from a list that all layers share.

Neighbouring layers may share their own pages as well; then one layer stands for all of them.

A layer's *own* pages are the best by its own attention at the last verify: fitting, but as old as
that verify. The *ranked* pages are shared by all layers and as new as the last vote of the refresh
layer, which can be the draft step before. A draft row reads, at every layer, the layer's own
pages and as many of the ranked ones, the best first, as the budget leaves room for; a page in both
counts once, so every layer reads equally many.

Without votes of draft rows and with the whole budget for own pages this is the list per layer of
SparseSpec (arXiv 2512.01278) and Vegas, with one list for all heads of a layer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from aspire_sglang.context.selection import SelectionConfig, pages_of, rank_pages


class LayerLists:
    """Page lists by request slot and layer, or group of layers that read alike.

    A slot without a list reads a window, as in :class:`~aspire_sglang.context.PageLists`; and as
    there, every row reads the *tail*: the last pages, and all pages that no vote has seen.

    Attributes:
        own: ``[num_slots, num_lists, own_width]`` int32 own pages, best first, up to
            ``own_counts``.
        own_counts: ``[num_slots]`` int64, the same in every list.
        ranked: ``[num_slots, ranked_width]`` int32 shared pages, best first, up to
            ``ranked_counts``. Sink and last pages come first.
        ranked_counts: ``[num_slots]`` int64.
        totals: ``[num_slots]`` int64 pages of a layer's list when the shared pages were ranked; 0
            where the slot has no list.
        built_for: ``[num_slots]`` int64 context length, in tokens, they were ranked for.
    """

    def __init__(
        self,
        num_slots: int,
        num_lists: int,
        max_pages: int,
        config: SelectionConfig,
        own_share: float,
        device: torch.device | str = "cpu",
    ) -> None:
        """Allocate the state once.

        Args:
            num_lists: lists per slot: layers, or groups of layers.
            max_pages: longest list; ``config.budget_pages`` of the longest context.
            own_share: part of the budget, less sink and last pages, for a layer's own pages; at 1
                the ranked pages are the sink and last ones only.

        Raises:
            ValueError: if the share is not in (0, 1], or ``max_pages`` cannot hold the sink and
                last pages.
        """
        if not 0.0 < own_share <= 1.0:
            raise ValueError(f"own_share must lie in (0, 1], got {own_share}")
        forced = config.sink_pages + config.last_pages
        if max_pages < forced:
            raise ValueError(f"max_pages ({max_pages}) must hold {forced} sink and last pages")
        self.config = config
        self.own_share = own_share
        self.num_lists = num_lists
        own_width = self._own_pages(max_pages)
        ranked_width = forced if own_share == 1.0 else max_pages

        def counts() -> Tensor:
            return torch.zeros(num_slots, dtype=torch.int64, device=device)

        def pages(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self.own = pages(num_slots, num_lists, own_width)
        self.ranked = pages(num_slots, ranked_width)
        self.own_counts, self.ranked_counts = counts(), counts()
        self.totals, self.built_for = counts(), counts()
        self._sink = torch.arange(config.sink_pages, dtype=torch.int32, device=device)
        self._columns = torch.arange(ranked_width, device=device)
        self.clear(slice(None))

    def _own_pages(self, budget: int) -> int:
        """Own pages of a list of ``budget`` pages."""
        free = budget - self.config.sink_pages - self.config.last_pages
        return max(round(self.own_share * free), 0)

    def clear(self, slots: Tensor | Sequence[int] | int | slice) -> None:
        """Forget the lists of slots, for example when a slot changes hands."""
        self.ranked[slots, : self.config.sink_pages] = self._sink
        self.own_counts[slots] = 0
        self.ranked_counts[slots] = self.config.sink_pages
        self.totals[slots] = 0
        self.built_for[slots] = 0

    def has(self, slots: Tensor) -> Tensor:
        """``[n]`` bool: does the slot have a list."""
        return self.totals[slots] > 0

    def set_ranked(self, slots: Tensor, page_scores: Tensor, context_lens: Tensor) -> None:
        """New shared pages.

        Args:
            slots: ``[n]`` int64, distinct.
            page_scores: ``[n, P]`` float scores that all layers share.
            context_lens: ``[n]`` int tokens scored.
        """
        ranking = rank_pages(page_scores, context_lens, self.config)
        width = min(ranking.pages.shape[1], self.ranked.shape[1])
        self.ranked[slots, :width] = ranking.pages[:, :width].int()
        self.ranked_counts[slots] = ranking.counts.clamp(max=width)
        self.totals[slots] = ranking.counts
        self.built_for[slots] = ranking.context_lens

    def set_own(self, slots: Tensor, page_scores: Tensor, context_lens: Tensor) -> None:
        """New own pages of all lists.

        Args:
            slots: ``[n]`` int64, distinct.
            page_scores: ``[n, num_lists, P]`` float32 scores for every list; overwritten.
            context_lens: ``[n]`` int tokens scored.
        """
        config, width = self.config, page_scores.shape[-1]
        num_pages = pages_of(context_lens, config.page_size)
        page = torch.arange(width, device=page_scores.device)
        # Sink and last pages are read anyway.
        free = (page >= config.sink_pages) & (page < num_pages.view(-1, 1) - config.last_pages)
        low = torch.finfo(page_scores.dtype).min
        scores = page_scores.nan_to_num_(nan=low, neginf=low)
        scores.masked_fill_(~free[:, None], -torch.inf)
        keep = min(self.own.shape[-1], width)
        self.own[slots, :, :keep] = scores.topk(keep, dim=-1, sorted=True).indices.int()
        share = (config.budgets(num_pages) - config.sink_pages - config.last_pages).double()
        counts = (self.own_share * share).round().long().clamp(min=0, max=keep)
        self.own_counts[slots] = torch.minimum(counts, free.sum(dim=-1))

    def spans(self, slots: Tensor, query_positions: Tensor) -> tuple[Tensor, Tensor]:
        """How draft rows divide their reading.

        Args:
            slots: ``[n]`` int64; a slot may repeat.
            query_positions: ``[n]`` int, position ``P`` of each query token.

        Returns:
            ``tails [n]`` int64, the first page of the tail, and ``heads [n]`` int64, pages to read
            before it, at most ``tails``.
        """
        config = self.config
        num_pages = query_positions.long().div(config.page_size, rounding_mode="floor") + 1
        budget = config.budgets(num_pages)
        has = self.has(slots)
        # No tail may start after the query's own page, even if the context shrank since.
        unscored = self.built_for[slots].div(config.page_size, rounding_mode="floor")
        recent = torch.minimum(num_pages - config.last_pages, unscored)
        window = num_pages - (budget - config.sink_pages)
        tails = torch.where(has, recent, window)
        tails = torch.where(num_pages <= budget, 0, tails).clamp(min=0)
        valid = self._columns < self.ranked_counts[slots].view(-1, 1)
        in_tail = (valid & (self.ranked[slots] >= tails.view(-1, 1))).sum(dim=-1)
        heads = torch.where(has, self.totals[slots] - in_tail, config.sink_pages)
        return tails, torch.minimum(heads.clamp(min=config.sink_pages), tails)

    def draft_pages(self, slots: Tensor, query_positions: Tensor) -> tuple[Tensor, Tensor]:
        """Pages of every list that draft rows read: the definition, and the kernels' reference.

        Args:
            slots: ``[n]`` int64; a slot may repeat.
            query_positions: ``[n]`` int, position ``P`` of each query token.

        Returns:
            ``pages [n, num_lists, K]`` int64, distinct and ascending, padded with 0, and
            ``counts [n]`` int64. The last page of a row is the query's own, to be read up to ``P``.
        """
        tails, heads = self.spans(slots, query_positions)
        num_pages = query_positions.long().div(self.config.page_size, rounding_mode="floor") + 1
        counts = heads + num_pages - tails
        width = int(num_pages.max()) if num_pages.numel() else 0
        tail, room = tails.view(-1, 1, 1), heads.view(-1, 1, 1)
        page = torch.arange(width, device=self.own.device)
        shape = (len(slots), self.num_lists, width + 1)
        # The last column takes what is not to be listed.
        listed = torch.zeros(shape, dtype=torch.bool, device=self.own.device)
        listed[..., :width] = (page < tail) & (page < self.config.sink_pages)

        own = self.own[slots].long()
        column = torch.arange(own.shape[-1], device=own.device)
        taken = (column < self.own_counts[slots].view(-1, 1, 1)) & (own < tail)
        taken &= ~listed.gather(-1, own.clamp(0, width))
        taken &= taken.cumsum(dim=-1) <= room - listed.sum(dim=-1, keepdim=True)
        listed.scatter_(-1, torch.where(taken, own, width), True)
        listed[..., width] = False

        shared = self.ranked[slots].long()[:, None].expand(-1, self.num_lists, -1)
        taken = (self._columns < self.ranked_counts[slots].view(-1, 1, 1)) & (shared < tail)
        taken &= ~listed.gather(-1, shared.clamp(0, width))
        taken &= taken.cumsum(dim=-1) <= room - listed.sum(dim=-1, keepdim=True)
        listed.scatter_(-1, torch.where(taken, shared, width), True)
        listed = listed[..., :width]

        # A context that shrank may have lost some of its listed pages: the most recent stand in.
        spare = ~listed & (page < tail)
        latest = spare.flip(-1).cumsum(dim=-1).flip(-1)
        listed |= spare & (latest <= room - listed.sum(dim=-1, keepdim=True))

        listed |= (page >= tail) & (page < num_pages.view(-1, 1, 1))
        most = int(counts.max()) if counts.numel() else 0
        pages = torch.where(listed, page, width).sort(dim=-1).values[..., :most]
        return pages.masked_fill(pages == width, 0), counts
