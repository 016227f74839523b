"""The sparse contexts of all running requests, and what a draft row reads from them.

A list is made when a context is scored and used for several draft steps while the context grows.
A draft row whose query stands at position ``P`` reads whole pages, cut off after ``P``:

* the pages of its list;
* every page from the one that held the end of the context when the list was made: newer text
  was never scored, so it is always read;
* the last pages, counted back from ``P``.

The last two are one contiguous tail, so the union is "list entries before the tail, then the
tail": sorted and distinct by construction, without a sort. The tail grows by at most the tokens
decoded since the list was made; refreshing the list brings the row back to its budget.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from aspire_sglang.context.selection import PageSelection, SelectionConfig


class PageLists:
    """Page lists by request slot.

    A slot without a list reads a window: the sink pages and the last pages up to the budget.
    Where the budget covers the context, a row reads everything, list or not.

    Attributes:
        pages: ``[num_slots, max_pages]`` int32, ascending; meaningful up to ``counts``.
        counts: ``[num_slots]`` int64, 0 where the slot has no list.
        built_for: ``[num_slots]`` int64 context length, in tokens, the list was made for.
    """

    def __init__(
        self,
        num_slots: int,
        max_pages: int,
        config: SelectionConfig,
        device: torch.device | str = "cpu",
    ) -> None:
        """Allocate the state once.

        Args:
            num_slots: request slots.
            max_pages: longest list; ``config.budget_pages`` of the longest context.
            config: the configuration the lists are selected with.
            device: where the state lives.

        Raises:
            ValueError: if ``max_pages`` cannot hold the sink and last pages.
        """
        if max_pages < config.sink_pages + config.last_pages:
            raise ValueError(
                f"max_pages ({max_pages}) must hold the {config.sink_pages} sink and "
                f"{config.last_pages} last pages"
            )
        self.config = config
        self.pages = torch.zeros((num_slots, max_pages), dtype=torch.int32, device=device)
        self.counts = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self.built_for = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self._columns = torch.arange(max_pages, device=device)
        self._in_page = torch.arange(config.page_size, device=device)
        self.clear(slice(None))

    def set(self, slots: Tensor, selection: PageSelection) -> None:
        """Store new lists.

        Args:
            slots: ``[n]`` int64, distinct.
            selection: ``n`` lists made with the same configuration.

        Raises:
            ValueError: if the lists are wider than the state or not ``n``.
        """
        width = selection.pages.shape[1]
        if width > self.pages.shape[1]:
            raise ValueError(f"lists of {width} pages do not fit into {self.pages.shape[1]}")
        if selection.pages.shape[0] != slots.shape[0]:
            raise ValueError(f"{selection.pages.shape[0]} lists for {slots.shape[0]} slots")
        self.pages[slots, :width] = selection.pages.to(torch.int32)
        self.counts[slots] = selection.counts
        self.built_for[slots] = selection.context_lens

    def clear(self, slots: Tensor | Sequence[int] | int | slice) -> None:
        """Forget the lists of slots, for example when a slot changes hands."""
        sink = self.config.sink_pages
        # Slots without a list find the sink pages where others find their list.
        self.pages[slots, :sink] = self._columns[:sink].to(torch.int32)
        self.counts[slots] = 0
        self.built_for[slots] = 0

    def has(self, slots: Tensor) -> Tensor:
        """``[n]`` bool: does the slot have a list."""
        return self.counts[slots] > 0

    def draft_pages(
        self, slots: Tensor, query_positions: Tensor, width: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Pages read by draft rows, for kernels that take page tables.

        Args:
            slots: ``[n]`` int64; a slot may repeat.
            query_positions: ``[n]`` int, position ``P`` of each query token.
            width: columns of the result. If not given it is the longest row, which costs a device
                sync; a given width must be large enough, longer rows would lose their last pages.

        Returns:
            ``pages [n, K]`` int64, distinct and ascending, padded with 0, and ``counts [n]`` int64.
            The last page of a row is the query's own, to be read up to ``P`` only.
        """
        size = self.config.page_size
        own = query_positions.long().div(size, rounding_mode="floor")
        num_pages = own + 1
        budget = self.config.budgets(num_pages)
        listed = self.counts[slots]
        has = listed > 0
        # No tail may start after the query's own page, even if the context shrank since.
        unscored = self.built_for[slots].div(size, rounding_mode="floor")
        recent = torch.minimum(num_pages - self.config.last_pages, unscored)
        window = num_pages - (budget - self.config.sink_pages)
        tail = torch.where(has, recent, window)
        tail = torch.where(num_pages <= budget, 0, tail).clamp(min=0)

        head = self.pages[slots].long()
        listed = torch.where(has, listed, self.config.sink_pages)
        in_head = (self._columns < listed.view(-1, 1)) & (head < tail.view(-1, 1))
        head_count = in_head.sum(dim=-1)
        counts = head_count + num_pages - tail
        if width is None:
            width = int(counts.max()) if counts.numel() else 0
        column = torch.arange(width, device=head.device)
        rows = tail.view(-1, 1) + (column - head_count.view(-1, 1))
        shared = min(width, head.shape[1])
        rows[:, :shared] = torch.where(in_head[:, :shared], head[:, :shared], rows[:, :shared])
        return rows * (column < counts.view(-1, 1)), counts

    def draft_positions(
        self, slots: Tensor, query_positions: Tensor, width: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Token positions read by draft rows.

        Args:
            slots: ``[n]`` int64; a slot may repeat.
            query_positions: ``[n]`` int, position ``P`` of each query token.
            width: *pages* per row of the result, as in :meth:`draft_pages`.

        Returns:
            ``positions [n, L]`` int64, distinct and ascending, all ``<= P``, ending with ``P``,
            padded with 0; and ``lens [n]`` int64.
        """
        size = self.config.page_size
        pages, counts = self.draft_pages(slots, query_positions, width)
        # Only the last page of a row, the query's own, can be partial.
        lens = (counts - 1) * size + query_positions.long() % size + 1
        positions = (pages.unsqueeze(-1) * size + self._in_page).flatten(1)
        inside = torch.arange(positions.shape[1], device=positions.device) < lens.view(-1, 1)
        return positions * inside, lens
