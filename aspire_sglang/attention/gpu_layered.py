"""Mixed attention on the GPU where layers, or groups of layers, have page lists of their own.

A draft row reads equally many pages at every layer, so one schedule of the attention serves all of
them; layers differ in the page table. One launch writes the tables of all lists before the first
layer. If the refresh layer's new list applies at once, the tables of the lists above it are written
after its vote, in one launch again.

Verify rows vote at one layer of each group, which is a second pass over their keys: the attention
of such a row reads keys and values, its votes the keys again: **half of the attention's bytes**,
and four bytes of the request table per token, where a key of all heads has ``2 * Hkv * D``. Shared
by ``n`` layers that is ``1 / (2 n)`` of the row's attention over all layers. For draft rows there
is no such pass but at the refresh layer. Of SmolLM2's 30 layers with 3 KV heads of 64, a row that
verifies after 7,000 tokens reads 161 MB; its votes add 81 MB with a list per layer, 27 with one for
three layers, 16 with one for five. A vote is a launch as well, in every captured step, whether or
not a row of it verifies.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from aspire_sglang.attention.gpu_mixed import GpuMixedAttention
from aspire_sglang.attention.mixed import MixedAttention, MixedPlan
from aspire_sglang.attention.step_buffers import StepView
from aspire_sglang.context.layer_lists import LayerLists
from aspire_sglang.context.page_lists import PageLists
from aspire_sglang.context.sparse import SparseContext
from aspire_sglang.kernels.layer_selection import scratch_size, select_own, select_shared
from aspire_sglang.kernels.layer_tables import build_layer_tables
from aspire_sglang.kernels.vote_rows import VoteRows


def create_gpu_attention(
    attention: MixedAttention, context: SparseContext, **options: Any
) -> GpuMixedAttention:
    """Mixed attention for the context's kind of lists; arguments as of
    :class:`~aspire_sglang.attention.gpu_mixed.GpuMixedAttention`."""
    layered = context.layer_lists is not None
    return (GpuLayeredAttention if layered else GpuMixedAttention)(attention, context, **options)


class GpuLayeredAttention(GpuMixedAttention):
    """See the module and the class above.

    Page tables take ``[lists, max_rows, columns]`` int32: 250 MB for 30 lists, 256 rows and 8,192
    tokens in single-token KV pages, a sixteenth of it with KV pages of 16.

    Raises:
        ValueError: as the class above; or the context has no list per layer.
    """

    def __init__(
        self, attention: MixedAttention, context: SparseContext, *, max_rows: int, **options: Any
    ) -> None:
        if context.layer_lists is None:
            raise ValueError(f"{context.refresh.source} has no list per layer")
        super().__init__(attention, context, max_rows=max_rows, **options)
        self._lists: LayerLists = context.layer_lists
        device, refresh = self._scores.device, context.refresh
        size = scratch_size(self._lists, max_rows)
        self._scratch = torch.zeros(size, dtype=torch.int32, device=device)
        # Rows that read everything have a page table from the usual kernel, which looks at no list.
        forced = context.selection.sink_pages + context.selection.last_pages
        self._no_lists = PageLists(1, forced, context.selection, device)
        every = range(self._lists.num_lists)
        self._before, self._after = every, range(0)
        if refresh.drafts_vote and refresh.same_step:
            # The list of the refresh layer's group may serve layers on both sides of it.
            above = refresh.layer + 1
            first = context.own_list(above) if above < context.num_layers else len(every)
            self._before, self._after = every[: context.own_list(refresh.layer) + 1], every[first:]

    @property
    def memory(self) -> int:
        return super().memory + self._scratch.numel() * self._scratch.element_size()

    def plan(self, step: StepView) -> None:
        self._step = step
        self._build_lists(self._before, full_rows=True)
        self._plan_lists()
        self._full_plan: MixedPlan | None = None
        if self._reads_all:
            no_drafts = self._all_full[: step.num_rows]
            self._build(self._full, step.slots, step.context_lens, no_drafts)
            self._full_plan = self._schedule(self._full, step)

    def attend(self, layer: Any, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        context, step, number = self.context, self._step, layer.layer_id
        own = context.own_list(number)
        plan = self._plans[own]
        if not context.full_rows_vote(number):
            plan.run(q, k, v, out=out)
            return
        refreshes = context.shares_votes(number)
        if refreshes and self._full_plan is not None:
            plan = self._full_plan
        _, lse = plan.run(q, k, v, out=out, return_lse=True)
        assert lse is not None
        # Draft rows have a vote at the refresh layer only, and nothing is read for them elsewhere.
        slots = step.voting if refreshes else step.verifying
        votes = VoteRows(slots, step.voters, step.positions)
        scores = self._score(layer, q, lse, k, votes, own)
        if refreshes:
            select_shared(scores, step.context_lens, step.voting, self._lists, self._scratch)
            if self._after:
                self._build_lists(self._after, full_rows=False)
                self._plan_lists()
        if context.completes_own(number):
            self._select_own(step.context_lens, step.verifying)

    def vote_prefill(self, layer: Any, q: Tensor, k: Tensor, v: Tensor) -> None:
        number = layer.layer_id
        scores = self._score_prefill(layer, q, k, v, self.context.own_list(number))
        slots, seq_lens, *_ = self._prefill
        if self.context.shares_votes(number):
            select_shared(scores, seq_lens, slots, self._lists, self._scratch)
        if self.context.completes_own(number):
            self._select_own(seq_lens, slots)

    def _select_own(self, context_lens: Tensor, slots: Tensor) -> None:
        scores = self._scores[:, : slots.shape[0]]
        select_own(scores, context_lens, slots, self._lists, self._scratch)

    def _build_lists(self, draft_lists: range, *, full_rows: bool) -> None:
        step = self._step
        build_layer_tables(
            self._req_to_token,
            step.slots,
            step.context_lens,
            step.draft,
            self._lists,
            self._sparse.pages[:, : step.num_rows],
            self._sparse.lens[: step.num_rows],
            kv_page_size=self._page_size,
            draft_lists=draft_lists,
            full_rows=full_rows,
        )

    def _plan_lists(self) -> None:
        """One schedule, for the tables of all lists."""
        step = self._step
        plan = self._schedule(self._sparse, step)
        self._plans = [plan.over(pages[: step.num_rows]) for pages in self._sparse.pages]

    def _page_lists(self) -> PageLists:
        return self._no_lists
