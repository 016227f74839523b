"""Mixed attention in PyTorch, for the CPU platform: full rows and draft rows of one forward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from aspire_sglang.attention.cpu_kernels import (
    FullPlan,
    Geometry,
    SinglePlan,
    Vote,
    full_attention,
    full_attention_with_scores,
    plan_full,
    plan_sparse,
    sparse_attention,
)
from aspire_sglang.attention.rows import ForwardRows
from aspire_sglang.context.sparse import SparseContext


class TorchMixedAttention:
    """Plans once per forward, then attends layer by layer.

    Full rows read their whole context at every layer. Draft rows read their sparse context, except
    at the refresh layer, where they read everything and choose a new one.

    Args:
        num_heads: query heads.
        req_to_token: ``[num_slots, width]`` KV slot of each position of each request.
        pool: KV pool with ``head_major(layer_id)``.

    Attributes:
        context: sparse contexts, or None where no row ever drafts.
    """

    def __init__(self, *, num_heads: int, req_to_token: Tensor, pool: Any) -> None:
        self._table = req_to_token
        self._pool = pool
        self.context: SparseContext | None = None
        keys, _ = pool.head_major(pool.start_layer)
        self._geometry = Geometry(num_heads, keys.shape[0], keys.shape[1])
        self._dtype = keys.dtype

    def plan(self, rows: ForwardRows) -> None:
        """Prepare one forward: which slots each row reads."""
        self._rows = rows
        self._full_rows = rows.full_rows
        self._draft_rows = rows.draft_rows
        self._full_plan = self._plan_full(self._full_rows) if self._full_rows else None
        self._full_voters = self._voters(self._full_rows)
        self._draft_voters = self._voters(self._draft_rows)
        if not rows.decoding and self.context is not None:
            # A short prompt makes no list; the last owner of its slot may have left one.
            self.context.lists.clear([rows.slots[row] for row in self._full_rows])
        # The refresh layer reads the whole context of draft rows too; planned on first use.
        self._refresh_plan: FullPlan | None = None
        self._sparse_plan = self._plan_sparse() if self._draft_rows else None

    def attend(self, layer: Any, q: Tensor, out: Tensor) -> None:
        """Attention of one layer; the KV of the new tokens is already in the pool.

        Args:
            layer: SGLang's ``RadixAttention``.
            q: ``[T, Hq, D]``.
            out: ``[T, Hq, D]``, written.
        """
        k, v = self._pool.head_major(layer.layer_id)
        drafts = len(self._draft_rows)
        if self._full_plan is not None:
            self._attend_full(layer, q[drafts:], k, v, out[drafts:])
        if self._sparse_plan is not None:
            queries, part = q[:drafts], out[:drafts]
            context = self.context
            voting = context is not None and context.draft_rows_vote(layer.layer_id)
            if voting and self._draft_voters:
                self._attend_refresh(layer, queries, k, v, part)
            else:
                sparse_attention(
                    queries, k, v, self._sparse_plan, layer.scaling, part, layer.logit_cap
                )

    def _attend_full(self, layer: Any, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        plan = self._full_plan
        assert plan is not None
        context = self.context
        voting = context is not None and context.full_rows_vote(layer.layer_id)
        if context is None or not (voting and self._full_voters):
            full_attention(q, k, v, plan, layer.scaling, out, layer.logit_cap)
            return
        # The first query of a verify speaks for the bonus token, the last for the newest draft;
        # of a prefill only the last is worth asking.
        voters = (0, -1) if self._rows.decoding else (-1,)
        votes = [Vote(i, voters) for i in self._full_voters]
        reduction = context.selection.reduction
        _, scores = full_attention_with_scores(
            q, k, v, plan, layer.scaling, votes, out, layer.logit_cap, reduction
        )
        self._vote([self._full_rows[i] for i in self._full_voters], scores)

    def _attend_refresh(self, layer: Any, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        context = self.context
        assert context is not None
        if self._refresh_plan is None:
            self._refresh_plan = self._plan_full(self._draft_rows)
        votes = [Vote(i) for i in self._draft_voters]
        reduction = context.selection.reduction
        plan = self._refresh_plan
        _, scores = full_attention_with_scores(
            q, k, v, plan, layer.scaling, votes, out, layer.logit_cap, reduction
        )
        self._vote([self._draft_rows[i] for i in self._draft_voters], scores)
        if context.refresh.same_step:
            self._sparse_plan = self._plan_sparse()

    def _voters(self, rows: list[int]) -> list[int]:
        """Places in ``rows`` of those whose context is long enough to need a page list."""
        context = self.context
        if context is None:
            return []
        lens = self._rows.context_lens
        return [place for place, row in enumerate(rows) if not context.is_dense(lens[row])]

    def _vote(self, rows: list[int], scores: list[Tensor]) -> None:
        assert self.context is not None
        self.context.vote(
            torch.tensor([self._rows.slots[row] for row in rows]),
            torch.nn.utils.rnn.pad_sequence(scores, batch_first=True),
            torch.tensor([self._rows.context_lens[row] for row in rows]),
        )

    def _plan_full(self, rows: list[int]) -> FullPlan:
        slots = [
            self._table[self._rows.slots[row], : self._rows.context_lens[row]].long()
            for row in rows
        ]
        page_size = self.context.selection.page_size if self.context is not None else 16
        q_lens = [self._rows.q_lens[row] for row in rows]
        return plan_full(slots, q_lens, self._geometry, self._dtype, page_size)

    def _plan_sparse(self) -> SinglePlan:
        assert self.context is not None
        slots = torch.tensor([self._rows.slots[row] for row in self._draft_rows])
        queries = torch.tensor([self._rows.context_lens[row] - 1 for row in self._draft_rows])
        positions, lens = self.context.lists.draft_positions(slots, queries)
        table = self._table[slots[:, None], positions].long()
        return plan_sparse(table, lens, self._geometry, self._dtype)
