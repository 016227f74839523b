"""The sparse context of a running server: whose votes make page lists, and when they apply."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from aspire_sglang.context.page_lists import PageLists
from aspire_sglang.context.selection import SelectionConfig, select_pages

#: Longest run of drafts that any configuration allows.
_LONGEST_RUN = 64

Source = Literal["refresh", "last_verify", "window"]


@dataclass(frozen=True)
class RefreshConfig:
    """Where page lists come from.

    Attributes:
        source: ``refresh``: draft rows vote at every step, verify and prefill rows too;
            ``last_verify``: verify and prefill rows only; ``window``: nobody, draft rows read the
            sink and the most recent pages.
        layer: the layer whose attention votes.
        same_step: layers above it read a draft row's new list in the same step.
    """

    source: Source
    layer: int
    same_step: bool


class SparseContext:
    """Page lists of all request slots together with the rule that refreshes them."""

    def __init__(
        self,
        selection: SelectionConfig,
        refresh: RefreshConfig,
        *,
        num_layers: int,
        num_slots: int,
        context_len: int,
        device: torch.device | str = "cpu",
    ) -> None:
        """
        Raises:
            ValueError: if the refresh layer does not exist.
        """
        if not 0 <= refresh.layer < num_layers:
            raise ValueError(
                f"refresh_layer {refresh.layer} does not exist: the model has layers 0 to "
                f"{num_layers - 1}"
            )
        self.selection = selection
        self.refresh = refresh
        self._num_layers = num_layers
        longest = selection.budget_pages(selection.num_pages(context_len))
        self.lists = PageLists(num_slots, longest, selection, device)

    def draft_rows_vote(self, layer: int) -> bool:
        """Whether draft rows read everything at this layer, to choose their pages anew."""
        return self.refresh.source == "refresh" and layer == self.refresh.layer

    def full_rows_vote(self, layer: int) -> bool:
        """Whether verify and prefill rows vote at this layer."""
        return self.refresh.source != "window" and layer == self.refresh.layer

    def is_dense(self, context_len: int) -> bool:
        """Whether draft rows behind so many tokens read everything, so that no list is needed."""
        pages = self.selection.num_pages(context_len + _LONGEST_RUN)
        return self.selection.budget_pages(pages) >= pages

    def vote(self, slots: Tensor, page_scores: Tensor, context_lens: Tensor) -> None:
        """Make new lists from the scores of ``n`` rows.

        Args:
            slots: ``[n]`` int64.
            page_scores: ``[n, P]`` float.
            context_lens: ``[n]`` int tokens scored.
        """
        self.lists.set(slots, select_pages(page_scores, context_lens, self.selection))

    def draft_kv(self, position: int) -> int:
        """KV tokens that a draft row at ``position`` reads per layer, averaged over the layers."""
        size = self.selection.page_size
        pages = self.selection.num_pages(position + 1)
        sparse = min(self.selection.budget_pages(pages) * size, position + 1)
        if self.refresh.source != "refresh":
            return sparse
        return (sparse * (self._num_layers - 1) + position + 1) // self._num_layers

    def draft_kv_many(self, positions: Sequence[int]) -> list[int]:
        """:meth:`draft_kv` of many positions."""
        selection = self.selection
        lens = np.asarray(positions, dtype=np.int64) + 1
        pages = -(-lens // selection.page_size)
        sparse = np.minimum(selection.budgets_of(pages) * selection.page_size, lens)
        if self.refresh.source == "refresh":
            sparse = (sparse * (self._num_layers - 1) + lens) // self._num_layers
        many: list[int] = sparse.tolist()
        return many

    def clear(self) -> None:
        """Forget all lists."""
        self.lists.clear(slice(None))

    def describe(self) -> str:
        """One line for the start-up log."""
        s, r = self.selection, self.refresh
        applies = "same step" if r.same_step else "next step"
        source = {
            "refresh": f"refreshed at every draft by layer {r.layer} ({applies})",
            "last_verify": f"chosen at verify steps by layer {r.layer}",
            "window": "sink and most recent pages",
        }[r.source]
        return (
            f"{source}; max({s.min_pages} pages, {s.ratio:.0%}) of {s.page_size} tokens, "
            f"{s.sink_pages} sink and {s.last_pages} last pages always"
        )
