"""Mixed attention of a serving step on the GPU: page tables, refresh of the page lists, layers.

In the *sparse* page table of a step a draft row lists its sparse context and a full row its whole
context. At the refresh layer draft rows vote for new pages: all keys of their context are scored
against the log-sum-exp of the row's own attention. That attention may read the list of the step
before, as in the layers below, or everything, from a second page table, the *full* one.

All of it is device work on tensors at fixed addresses, so one captured CUDA graph serves every
step of the same number of row and token places.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from aspire_sglang.attention.mixed import MixedAttention, MixedPlan, MixedStep
from aspire_sglang.attention.step_buffers import StepView
from aspire_sglang.context.page_lists import PageLists
from aspire_sglang.context.sparse import SparseContext
from aspire_sglang.kernels.page_scores import page_scores
from aspire_sglang.kernels.page_selection import select_pages
from aspire_sglang.kernels.page_tables import build_tables
from aspire_sglang.kernels.refresh_tables import refresh_tables
from aspire_sglang.kernels.vote_rows import VoteRows
from aspire_sglang.runtime.ranks import Ranks

REFRESH_READS_ALL = False
"""Whether draft rows attend to everything at the refresh layer of a server."""


@dataclass(frozen=True)
class _Table:
    """``pages``: ``[lists, max_rows, W]`` int32. ``lens``: ``[max_rows]`` int32 tokens listed, the
    same by every list."""

    pages: Tensor
    lens: Tensor

    def step(self, cu_seqlens_q: Tensor, max_seqlen_q: int) -> MixedStep:
        rows = cu_seqlens_q.shape[0] - 1
        return MixedStep(self.pages[0, :rows], self.lens[:rows], cu_seqlens_q, max_seqlen_q)


class GpuMixedAttention:
    """Plans once per step, then attends layer by layer. Layers share one page list of a request.

    Args:
        attention: the kernel behind it.
        context: sparse contexts of all requests, on the device.
        req_to_token: ``[num_slots, width]`` int32 KV slot of each position.
        page_size: tokens per page of the KV pool; divides the page size of ``context``.
        max_rows: most rows of a step.
        max_seqlen_q: most query tokens of a row.
        refresh_reads_all: whether draft rows attend to everything at the refresh layer.
        ranks: those that hold the other heads. All heads vote, so that every rank chooses the same
            pages: one message a step, of a number per page of each row place.

    Raises:
        ValueError: if lists of the context's pages cannot name pages of the pool, or several layers
            refresh them.
    """

    _scores: Tensor
    """``[lists, max_rows, pages]`` float32, of a list's voters."""

    def __init__(
        self,
        attention: MixedAttention,
        context: SparseContext,
        *,
        req_to_token: Tensor,
        page_size: int,
        max_rows: int,
        max_seqlen_q: int,
        refresh_reads_all: bool = False,
        ranks: Ranks | None = None,
    ) -> None:
        if context.refresh.source == "delta":
            raise ValueError("context.selection delta runs on a CPU only: on a GPU use another one")
        if context.selection.page_size % page_size:
            raise ValueError(
                f"the sparse context's page_size {context.selection.page_size} must be a multiple "
                f"of the KV pool's page size {page_size}"
            )
        self._attention = attention
        self._ranks = ranks or Ranks()
        self.context = context
        self._req_to_token = req_to_token
        self._page_size = page_size
        self._max_seqlen_q = max_seqlen_q
        self._reads_all = refresh_reads_all and context.refresh.drafts_vote
        device, width = req_to_token.device, req_to_token.shape[1]
        lists = 1 if context.layer_lists is None else context.layer_lists.num_lists
        self._full = self._new_table(1, max_rows, width, device)
        self._sparse = self._new_table(lists, max_rows, width, device)
        self._scores = torch.zeros(
            (lists, max_rows, context.selection.num_pages(width)),
            dtype=torch.float32,
            device=device,
        )
        self._all_full = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self._ones_indptr = torch.arange(max_rows + 1, dtype=torch.int32, device=device)
        self._no_second = torch.full((max_rows,), -1, dtype=torch.int32, device=device)

    @property
    def memory(self) -> int:
        """Bytes of the page tables and scores."""
        tensors = (self._full.pages, self._sparse.pages, self._scores)
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def plan(self, step: StepView) -> None:
        """Write the page tables of a step and schedule its rows. May be captured."""
        self._step = step
        self._build(self._sparse, step.slots, step.context_lens, step.draft)
        self._sparse_plan = self._schedule(self._sparse, step)
        self._full_plan: MixedPlan | None = None
        if self._reads_all:
            no_drafts = self._all_full[: step.num_rows]
            self._build(self._full, step.slots, step.context_lens, no_drafts)
            self._full_plan = self._schedule(self._full, step)

    def attend(self, layer: Any, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        """Attention of one layer; the KV of the new tokens is already in the pool.

        Args:
            layer: SGLang's ``RadixAttention``.
            q: ``[T, Hq, D]``.
            k, v: ``[num_slots, Hkv, D]``, the layer's pool.
            out: ``[T, Hq, D]``; places of tokens that no row owns are not written.
        """
        context, step = self.context, self._step
        if not context.full_rows_vote(layer.layer_id):
            self._sparse_plan.run(q, k, v, out=out)
            return
        plan = self._full_plan or self._sparse_plan
        _, lse = plan.run(q, k, v, out=out, return_lse=True)
        assert lse is not None
        votes = VoteRows(step.voting, step.voters, step.positions)
        scores = self._score(layer, q, lse, k, votes)
        if context.refresh.source != "refresh" or not context.refresh.same_step:
            select_pages(scores, step.context_lens, step.voting, context.lists)
            return
        rows = step.num_rows
        refresh_tables(
            scores,
            self._req_to_token,
            step.slots,
            step.context_lens,
            step.draft,
            context.lists,
            self._sparse.pages[0, :rows],
            self._sparse.lens[:rows],
            kv_page_size=self._page_size,
        )
        self._sparse_plan = self._schedule(self._sparse, step)

    def plan_prefill(self, slots: Tensor, seq_lens: Tensor, q_ends: Tensor) -> None:
        """Prepare the vote of a prefill: the last token of each prompt chunk.

        Args:
            slots: ``[n]`` int row of the request table.
            seq_lens: ``[n]`` int tokens of the context, the chunk included.
            q_ends: ``[n]`` int end of the row's query tokens.
        """
        rows = slots.shape[0]
        slots, seq_lens = slots.int(), seq_lens.int()
        self._build(self._full, slots, seq_lens, self._all_full[:rows])
        step = self._full.step(self._ones_indptr[: rows + 1], 1)
        self._prefill = (slots, seq_lens, q_ends.long() - 1, self._attention.plan(step))

    def vote_prefill(self, layer: Any, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Make the first page lists, where full rows vote; arguments as ``attend``."""
        scores = self._score_prefill(layer, q, k, v)
        slots, seq_lens, *_ = self._prefill
        select_pages(scores, seq_lens, slots, self.context.lists)

    def _score_prefill(
        self, layer: Any, q: Tensor, k: Tensor, v: Tensor, number: int = 0
    ) -> Tensor:
        slots, seq_lens, last, plan = self._prefill
        rows = slots.shape[0]
        queries = q[last]
        _, lse = plan.run(queries, k, v, return_lse=True)
        assert lse is not None
        voters = torch.stack([self._ones_indptr[:rows], self._no_second[:rows]], dim=1)
        return self._score(layer, queries, lse, k, VoteRows(slots, voters, seq_lens - 1), number)

    def _score(
        self, layer: Any, q: Tensor, lse: Tensor, k: Tensor, votes: VoteRows, number: int = 0
    ) -> Tensor:
        """``[R, pages]`` scores of the rows, for the list ``number``."""
        selection = self.context.selection
        scores = page_scores(
            q,
            lse,
            k,
            self._req_to_token,
            votes,
            self._scores[number, : votes.slots.shape[0]],
            page_size=selection.page_size,
            scale=layer.scaling,
            reduction=selection.reduction,
            logit_cap=layer.logit_cap or 0.0,
        )
        # By page, not by token as on a CPU: a sixteenth of the bytes, which a captured step sends
        # for the longest context. With "max" a page counts what the heads of one rank see in it,
        # at the rank where that is most.
        return self._ranks.votes(scores, selection.reduction)

    def _schedule(self, table: _Table, step: StepView) -> MixedPlan:
        return self._attention.plan(table.step(step.cu_seqlens_q, self._max_seqlen_q))

    def _build(self, table: _Table, slots: Tensor, context_lens: Tensor, draft: Tensor) -> None:
        """One page table per row."""
        rows = slots.shape[0]
        build_tables(
            self._req_to_token,
            slots,
            context_lens,
            draft,
            self._page_lists(),
            table.pages[0, :rows],
            table.lens[:rows],
            kv_page_size=self._page_size,
        )

    def _page_lists(self) -> PageLists:
        return self.context.lists

    def _new_table(self, lists: int, max_rows: int, width: int, device: torch.device) -> _Table:
        columns = -(-width // self._page_size)
        return _Table(
            torch.zeros((lists, max_rows, columns), dtype=torch.int32, device=device),
            torch.zeros(max_rows, dtype=torch.int32, device=device),
        )
