"""Mixed attention of the CPU platform: full rows and draft rows of one forward, and their votes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from aspire_sglang.attention.cpu_attention import CpuAttention
from aspire_sglang.attention.cpu_lists import draft_slots
from aspire_sglang.attention.cpu_plan import Row, RowsPlan
from aspire_sglang.attention.rows import ForwardRows
from aspire_sglang.context.sparse import SparseContext
from aspire_sglang.runtime.ranks import Ranks


class CpuMixedAttention:
    """Plans once per forward, then attends layer by layer.

    Full rows read their whole context at every layer. Draft rows read their sparse context, except
    at the refresh layer, where they read everything and choose a new one.

    A plan holds for all layers that read and vote alike, a new list ends it; lists of single layers
    or of groups of them are one plan too, as all layers of a row read equally many keys.

    Args:
        num_heads: query heads.
        req_to_token: int32 ``[num_slots, width]`` KV slot of each position of each request.
        pool: KV pool with ``head_major(layer_id)``.
        ranks: those that hold the other heads. All heads vote, so that every rank chooses the pages
            that one rank with all heads would choose.

    Attributes:
        context: sparse contexts, or None where no row ever drafts.
    """

    def __init__(
        self, *, num_heads: int, req_to_token: Tensor, pool: Any, ranks: Ranks | None = None
    ) -> None:
        self._table = req_to_token
        self._pool = pool
        self._ranks = ranks or Ranks()
        self._num_heads = num_heads * self._ranks.size
        self.context: SparseContext | None = None
        self._pools: tuple[np.ndarray, np.ndarray] | None = None
        keys, _ = pool.head_major(pool.start_layer)
        kv_heads, num_slots, dim = keys.shape
        self._attention = CpuAttention(num_heads, kv_heads, num_slots, dim, keys.dtype)

    def plan(self, rows: ForwardRows) -> None:
        """Prepare one forward: which slots each row reads."""
        self._rows = rows
        # Query tokens lie in this order, see ForwardRows.
        self._drafts = rows.draft_rows
        self._order = self._drafts + rows.full_rows
        self._own_scores: list[Tensor] = []
        if not rows.decoding and self.context is not None:
            # A short prompt makes no list; the last owner of its slot may have left one.
            self.context.forget([rows.slots[row] for row in rows.full_rows])
        self._plans: dict[tuple[int, frozenset[int], frozenset[int]], RowsPlan] = {}
        # Slots that draft rows read, by shared list and row: plans that differ in who votes share
        # them.
        self._read: dict[int, dict[int, Tensor]] = {}

    def attend(self, layer: Any, q: Tensor, out: Tensor) -> None:
        """Attention of one layer; the KV of the new tokens is already in the pool.

        Args:
            layer: SGLang's ``RadixAttention``.
            q: ``[T, Hq, D]``.
            out: ``[T, Hq, D]``, written.
        """
        number = layer.layer_id
        k, v = self._pool.head_major(number)
        plan = self._plan_of(number, self._voters(number))
        at = 0 if self.context is None else self.context.own_list(number)
        self._attention.attend(q, k, v, plan, layer.scaling, out, layer.logit_cap, at)
        self.attended(number)

    @property
    def phases(self) -> tuple[Any, ...]:
        """Attention as phases of a program."""
        return self._attention.phases

    def prepare(
        self, jobs: np.ndarray, first: int, q: Tensor, out: Tensor
    ) -> tuple[int, tuple[int, ...]]:
        """Prepare consecutive layers for a program that computes whole layers: as many as read
        alike and need no vote between them.

        Args:
            jobs: ``JOB`` records, one per layer, with scales and caps; those of the layers
                prepared are written.
            first: the first layer.
            q, out: as of :meth:`attend`, float32; shared by the layers.

        Returns:
            The layer behind the last one prepared, and the items of each phase.
        """
        voters = self._voters(first)
        plan = self._plan_of(first, voters)
        stop = first + 1
        while stop < len(jobs) and not voters:
            voters = self._voters(stop)
            if voters or self._plan_of(stop, voters) is not plan:
                break
            stop += 1
        keys, values = self._addresses(first)
        part = slice(first, stop)
        share = 1 if self.context is None else self.context.refresh.list_layers
        items = self._attention.prepare(
            jobs[part], keys[part], values[part], q, out, plan, first, share
        )
        return stop, items

    def _addresses(self, layer: int) -> tuple[np.ndarray, np.ndarray]:
        """Addresses of all layers' keys and values; ``layer`` tells whether they have moved."""
        keys, _ = self._pool.head_major(layer)
        if self._pools is None or self._pools[0][layer] != keys.data_ptr():
            pools = [self._pool.head_major(number) for number in range(self._pool.layer_num)]
            at = [[tensor.data_ptr() for tensor in pool] for pool in pools]
            keys_at, values_at = np.array(at).T
            self._pools = keys_at, values_at
        return self._pools

    def attended(self, number: int) -> None:
        """Let rows vote, once the attention of layer ``number`` has been computed."""
        voters = self._voters(number)
        if voters:
            plan = self._plan_of(number, voters)
            if self.context is not None and not self.context.refresh.same_step:
                # Layers above go on with the old list.
                self._lists(self._drafts, number + 1)
            self._vote(number, plan, [row for row in self._order if row in voters])

    def _voters(self, layer: int) -> frozenset[int]:
        """Rows whose attention at this layer scores their pages."""
        context = self.context
        if context is None:
            return frozenset()
        draft, full = context.draft_rows_vote(layer), context.full_rows_vote(layer)
        if not draft and not full:
            return frozenset()
        lens, drafts = self._rows.context_lens, self._rows.draft
        return frozenset(
            row
            for row in self._order
            if (draft if drafts[row] else full) and not context.is_dense(lens[row])
        )

    def _plan_of(self, layer: int, voters: frozenset[int]) -> RowsPlan:
        """The plan of a layer: made once for all layers that read and vote alike."""
        context = self.context
        if context is not None and context.draft_rows_read_all(layer):
            whole = voters | frozenset(self._drafts if layer < context.refresh.full_layers else ())
        else:
            whole = voters
        key = (0 if context is None else context.group(layer), voters, whole)
        if key not in self._plans:
            self._plans[key] = self._plan_rows(layer, voters, whole)
        return self._plans[key]

    def _plan_rows(self, layer: int, voters: frozenset[int], whole: frozenset[int]) -> RowsPlan:
        """Plan the rows in order of their tokens; ``whole`` and full rows read everything."""
        rows = self._rows
        lists = self._lists([row for row in self._drafts if row not in whole], layer)
        planned = []
        for row in self._order:
            slots = None if row in whole else lists.get(row)
            if slots is None:
                slots = self._table[rows.slots[row], : rows.context_lens[row]]
            voting = self._queries_that_vote(row) if row in voters else ()
            planned.append(Row(slots, rows.q_lens[row], voting))
        return self._attention.plan(planned)

    def _lists(self, rows: list[int], layer: int) -> dict[int, Tensor]:
        """The slots that draft rows read at a layer, or by every list, at least for ``rows``."""
        context = self.context
        if context is None:
            return {}
        known = self._read.setdefault(context.group(layer), {})
        rows = [row for row in rows if row not in known]
        if rows:
            known.update(zip(rows, self._list_slots(context, rows, layer), strict=True))
        return known

    def _list_slots(self, context: SparseContext, rows: list[int], layer: int) -> list[Tensor]:
        slots = [self._rows.slots[row] for row in rows]
        queries = [self._rows.context_lens[row] - 1 for row in rows]
        if context.layer_lists is not None:
            return draft_slots(context.layer_lists, slots, queries, self._table)
        entries = torch.tensor(context.entries(slots, layer))
        positions, lens = context.lists.draft_positions(entries, torch.tensor(queries))
        table = self._table[torch.tensor(slots)[:, None], positions]
        return [row[:length] for row, length in zip(table, lens.tolist(), strict=True)]

    def _queries_that_vote(self, row: int) -> tuple[int, ...]:
        # The first query of a verify speaks for the bonus token, the last for the newest draft;
        # of a prefill only the last is worth asking.
        last = self._rows.q_lens[row] - 1
        return (0, last) if self._rows.decoding and last else (last,)

    def _vote(self, layer: int, plan: RowsPlan, voters: list[int]) -> None:
        context = self.context
        assert context is not None
        scores = self._page_scores(plan)
        slots = torch.tensor([self._rows.slots[row] for row in voters])
        lens = torch.tensor([self._rows.context_lens[row] for row in voters])
        if context.shares_votes(layer):
            context.vote(slots, _padded(scores), lens, layer)
            if self._drafts and context.refresh.drafts_vote and context.refresh.same_step:
                self._plans.clear()
                self._read.clear()
        full = [place for place, row in enumerate(voters) if not self._rows.draft[row]]
        if context.layer_lists is not None and full:
            self._own_scores.append(_padded([scores[place] for place in full]))
            if context.completes_own(layer):
                own = torch.stack(self._own_scores, dim=1)
                context.layer_lists.set_own(slots[full], own, lens[full])

    def _page_scores(self, plan: RowsPlan) -> list[Tensor]:
        """Scores of the voting rows' pages over the heads of all ranks."""
        assert self.context is not None
        selection = self.context.selection
        if self._ranks.alone:
            return self._attention.page_scores(plan, selection.page_size, selection.reduction)
        # A page's score is a sum over its tokens of what all heads say, so tokens are agreed on.
        tokens = self._attention.token_scores(plan, selection.reduction)
        tokens = self._ranks.votes(tokens, selection.reduction)
        if selection.reduction == "mean":
            tokens /= self._num_heads
        return page_sums(tokens, plan, selection.page_size)


def page_sums(token_scores: Tensor, plan: RowsPlan, page_size: int) -> list[Tensor]:
    """Page scores of the voting rows from the token scores of their voters.

    Args:
        token_scores: ``[voters, width]``, 0 behind a row's keys.

    Returns:
        Per row with voters ``[ceil(L / page_size)]``.
    """
    width = token_scores.shape[1]
    padded = torch.nn.functional.pad(token_scores, (0, -width % page_size))
    pages = padded.view(len(padded), -1, page_size).sum(-1)
    scores, vote = [], 0
    for row in plan.rows:
        if voters := len(row.voters):
            count = -(-row.length // page_size)
            scores.append(pages[vote : vote + voters, :count].mean(0))
            vote += voters
    return scores


def _padded(scores: list[Tensor]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(scores, batch_first=True)
