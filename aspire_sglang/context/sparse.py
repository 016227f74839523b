"""The sparse context of a running server: whose votes make page lists, and when they apply."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from aspire_sglang.context.layer_lists import LayerLists
from aspire_sglang.context.page_lists import PageLists
from aspire_sglang.context.selection import SelectionConfig, select_pages

#: Longest run of drafts that any configuration allows.
_LONGEST_RUN = 64

Source = Literal["refresh", "last_verify", "window", "hybrid", "last_verify_per_layer", "delta"]


@dataclass(frozen=True)
class RefreshConfig:
    """Where page lists come from.

    Attributes:
        source: ``refresh``: draft rows vote at every step, verify and prefill rows too;
            ``last_verify``: verify and prefill rows only; ``window``: nobody, draft rows read the
            sink and the most recent pages; ``last_verify_per_layer``: verify and prefill rows vote
            at every layer for its own list; ``hybrid``: they do, and the list of ``refresh`` fills
            up the rest of the budget; ``delta``: as ``refresh`` with several voting layers,
            each for the layers up to the next one (DELTA, arXiv 2510.09883).
        layer: the layer whose attention votes.
        same_step: layers above it read a draft row's new list in the same step.
        own_share: ``hybrid``: part of the budget, less sink and last pages, for own pages.
        list_layers: ``hybrid`` and ``last_verify_per_layer``: neighbouring layers that share their
            own pages, chosen by one of them.
        group_layers: ``delta``: the voting layers, ascending.
        full_layers: ``delta``: first layers at which draft rows read everything.
    """

    source: Source
    layer: int
    same_step: bool
    own_share: float = 0.5
    list_layers: int = 1
    group_layers: tuple[int, ...] = ()
    full_layers: int = 0

    @property
    def voting_layers(self) -> tuple[int, ...]:
        """Layers whose votes make the lists that other layers read too."""
        if self.source == "window":
            return ()
        return self.group_layers if self.source == "delta" else (self.layer,)

    @property
    def drafts_vote(self) -> bool:
        """Whether draft rows vote, and read everything at the voting layers."""
        return self.source in ("refresh", "hybrid", "delta")

    def own_voters(self, num_layers: int) -> tuple[int, ...]:
        """The layers whose votes make own pages, one for each group of layers, ascending.

        It is the middle layer of a group. Where the refresh layer belongs to the group, it is the
        refresh layer, whose scores exist anyway.
        """
        if not self.list_per_layer:
            return ()
        voters = []
        for first in range(0, num_layers, self.list_layers):
            stop = min(first + self.list_layers, num_layers)
            inside = first <= self.layer < stop
            voters.append(self.layer if inside else (first + stop - 1) // 2)
        return tuple(voters)

    @property
    def list_per_layer(self) -> bool:
        """Whether every layer, or group of ``list_layers`` layers, has a list of its own, which its
        own votes make."""
        return self.source in ("hybrid", "last_verify_per_layer")


class SparseContext:
    """Page lists of all request slots together with the rule that refreshes them.

    Attributes:
        layer_lists: a page list per layer or group of layers, or None where all layers share lists.
        num_layers: layers of the model.
        own_voters: the layers whose votes make own pages, see :meth:`RefreshConfig.own_voters`.
    """

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
            ValueError: if a voting layer does not exist, or no layer is to share a list.
        """
        _check_layers(refresh, num_layers)
        self.selection = selection
        self.refresh = refresh
        self.num_layers = num_layers
        longest = selection.budget_pages(selection.num_pages(context_len))
        self._full = sum(self.draft_rows_read_all(layer) for layer in range(num_layers))
        self._lists: PageLists | None = None
        self.layer_lists: LayerLists | None = None
        self._groups = max(len(refresh.voting_layers), 1)
        self.own_voters = refresh.own_voters(num_layers)
        self._full_voters = frozenset((*self.own_voters, *refresh.voting_layers))
        if refresh.list_per_layer:
            share = refresh.own_share if refresh.source == "hybrid" else 1.0
            self.layer_lists = LayerLists(
                num_slots, len(self.own_voters), longest, selection, share, device
            )
        else:
            self._lists = PageLists(num_slots * self._groups, longest, selection, device)

    @property
    def lists(self) -> PageLists:
        """Page lists that layers share. Of several groups of layers, group ``g`` of slot ``s`` has
        entry ``s * groups + g``.

        Raises:
            RuntimeError: if layers have lists of their own.
        """
        if self._lists is None:
            raise RuntimeError(f"{self.refresh.source} has a list per layer")
        return self._lists

    def draft_rows_vote(self, layer: int) -> bool:
        """Whether draft rows read everything at this layer, to choose their pages anew."""
        return self.refresh.drafts_vote and layer in self.refresh.voting_layers

    def draft_rows_read_all(self, layer: int) -> bool:
        """Whether draft rows read everything at this layer."""
        return layer < self.refresh.full_layers or self.draft_rows_vote(layer)

    def full_rows_vote(self, layer: int) -> bool:
        """Whether verify and prefill rows vote at this layer."""
        return layer in self._full_voters

    def shares_votes(self, layer: int) -> bool:
        """Whether the votes of this layer make lists for other layers, by :meth:`vote`."""
        return layer in self.refresh.voting_layers

    def group(self, layer: int) -> int:
        """Which of the shared lists ``layer`` reads; 0 where there is one."""
        # Layers below the first voting one read its list of the step before.
        return sum(first < layer for first in self.refresh.voting_layers[1:])

    def entries(self, slots: Sequence[int], layer: int) -> list[int]:
        """Entries of ``lists`` that ``layer`` reads for some slots."""
        return [slot * self._groups + self.group(layer) for slot in slots]

    def own_list(self, layer: int) -> int:
        """Which of ``layer_lists`` a layer reads, and chooses if it is one of ``own_voters``."""
        return layer // self.refresh.list_layers

    def completes_own(self, layer: int) -> bool:
        """Whether the own pages of all lists are chosen once this layer has voted."""
        return bool(self.own_voters) and layer == self.own_voters[-1]

    def is_dense(self, context_len: int) -> bool:
        """Whether draft rows behind so many tokens read everything, so that no list is needed."""
        pages = self.selection.num_pages(context_len + _LONGEST_RUN)
        return self.selection.budget_pages(pages) >= pages

    def vote(self, slots: Tensor, page_scores: Tensor, context_lens: Tensor, layer: int) -> None:
        """Make new lists from the scores of ``n`` rows at a voting layer.

        Args:
            slots: ``[n]`` int64.
            page_scores: ``[n, P]`` float.
            context_lens: ``[n]`` int tokens scored.
            layer: where they were scored.
        """
        if self.layer_lists is not None:
            self.layer_lists.set_ranked(slots, page_scores, context_lens)
        else:
            group = self.refresh.voting_layers.index(layer)
            chosen = select_pages(page_scores, context_lens, self.selection)
            self.lists.set(slots * self._groups + group, chosen)

    def draft_kv(self, position: int) -> int:
        """KV tokens that a draft row at ``position`` reads per layer, averaged over the layers."""
        (tokens,) = self.draft_kv_many([position])
        return tokens

    def draft_kv_many(self, positions: Sequence[int]) -> list[int]:
        """:meth:`draft_kv` of many positions."""
        selection = self.selection
        lens = np.asarray(positions, dtype=np.int64) + 1
        pages = -(-lens // selection.page_size)
        sparse = np.minimum(selection.budgets_of(pages) * selection.page_size, lens)
        total = sparse * (self.num_layers - self._full) + lens * self._full
        many: list[int] = (total // self.num_layers).tolist()
        return many

    def forget(self, slots: Sequence[int] | slice) -> None:
        """Forget the lists of some slots."""
        if self.layer_lists is not None:
            self.layer_lists.clear(slots)
        elif isinstance(slots, slice):
            self.lists.clear(slots)
        else:
            entries = [s * self._groups + g for s in slots for g in range(self._groups)]
            self.lists.clear(entries)

    def clear(self) -> None:
        """Forget all lists."""
        self.forget(slice(None))

    def describe(self) -> str:
        """One line for the start-up log."""
        s, r = self.selection, self.refresh
        applies = "same step" if r.same_step else "next step"
        refreshed = f"refreshed at every draft by layer {r.layer} ({applies})"
        groups = ", ".join(map(str, r.group_layers))
        per, chooser = "layer", "the layer"
        if r.list_layers > 1:
            per, chooser = f"{r.list_layers} layers", "one of them"
        source = {
            "refresh": refreshed,
            "last_verify": f"chosen at verify steps by layer {r.layer}",
            "window": "sink and most recent pages",
            "hybrid": f"per {per}, {r.own_share:.0%} chosen by {chooser} at verify steps, "
            f"the rest {refreshed}",
            "last_verify_per_layer": f"per {per}, chosen by {chooser} at verify steps",
            "delta": f"refreshed at every draft by layers {groups}, each for the layers up "
            f"to the next; layers below {r.full_layers} read everything",
        }[r.source]
        return (
            f"{source}; max({s.min_pages} pages, {s.ratio:.0%}) of {s.page_size} tokens, "
            f"{s.sink_pages} sink and {s.last_pages} last pages always"
        )


def _check_layers(refresh: RefreshConfig, num_layers: int) -> None:
    if refresh.list_layers < 1:
        raise ValueError(f"list_layers must be at least 1, got {refresh.list_layers}")
    layers = "layers" if refresh.source == "delta" else "layer"
    for layer in (refresh.layer, *refresh.group_layers):
        if not 0 <= layer < num_layers:
            raise ValueError(
                f"refresh_{layers} {layer} does not exist: the model has layers 0 to "
                f"{num_layers - 1}"
            )
