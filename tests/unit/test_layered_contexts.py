"""Whole steps with lists per layer or group of layers, against dense attention over those lists."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from aspire_sglang.attention.cpu_attention import CpuAttention
from aspire_sglang.attention.cpu_job import JOB, write_scales
from aspire_sglang.attention.cpu_mixed import CpuMixedAttention
from aspire_sglang.attention.cpu_plan import Row
from aspire_sglang.attention.program import Program
from aspire_sglang.attention.rows import ForwardRows
from aspire_sglang.context.selection import SelectionConfig, token_scores_to_page_scores
from aspire_sglang.context.sparse import RefreshConfig, SparseContext

LAYERS, SLOTS, WIDTH, HEADS, KV_HEADS, DIM = 5, 4, 512, 6, 2, 16
SCALE = 0.5
SELECTION = {
    1: SelectionConfig(page_size=1, min_pages=48, ratio=0.0, sink_pages=2, last_pages=8),
    4: SelectionConfig(page_size=4, min_pages=12, ratio=0.0, sink_pages=1, last_pages=2),
}


class Model:
    """Attention of a few layers with random keys, step by step, next to a dense reference."""

    def __init__(self, source: str, page_size: int, same_step: bool = True, **options) -> None:
        torch.manual_seed(0)
        size = SLOTS * WIDTH
        self.pools = [torch.randn(2, KV_HEADS, size, DIM).unbind(0) for _ in range(LAYERS)]
        pool = SimpleNamespace(
            start_layer=0, layer_num=LAYERS, head_major=lambda layer: self.pools[layer]
        )
        self.table = torch.randperm(size).view(SLOTS, WIDTH).int()
        self.mixed = CpuMixedAttention(num_heads=HEADS, req_to_token=self.table, pool=pool)
        self.selection = SELECTION[page_size]
        self.context = self.mixed.context = SparseContext(
            self.selection,
            RefreshConfig(source, layer=2, same_step=same_step, **options),
            num_layers=LAYERS,
            num_slots=SLOTS,
            context_len=WIDTH,
        )

    def dense(self, layer: int, slot: int, q: Tensor, positions: Tensor, first: int):
        """Output and probabilities of queries at ``first``, ... over some positions."""
        keys, values = (pool[:, self.table[slot, positions]] for pool in self.pools[layer])
        group = HEADS // KV_HEADS
        keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
        scores = torch.einsum("qhd,hld->qhl", q, keys) * SCALE
        seen = positions <= torch.arange(first, first + len(q)).view(-1, 1, 1)
        probs = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        return torch.einsum("qhl,hld->qhd", probs, values), probs

    def listed(self, layer: int, slot: int, position: int) -> Tensor:
        """Positions that the present lists give a draft row."""
        where, query = torch.tensor([slot]), torch.tensor([position])
        if self.context.layer_lists is not None:
            pages, counts = self.context.layer_lists.draft_pages(where, query)
            pages = pages[0, self.context.own_list(layer), : counts[0]]
        else:
            entries = torch.tensor(self.context.entries([slot], layer))
            pages, counts = self.context.lists.draft_pages(entries, query)
            pages = pages[0, : counts[0]]
        size = self.selection.page_size
        tokens = (pages[:, None] * size + torch.arange(size)).flatten()
        return tokens[tokens <= position]

    def step(self, rows: ForwardRows, reads_all: tuple[int, ...], seed: int) -> dict:
        """Run a step and compare every row at every layer; page scores by (row, layer)."""
        generator = torch.Generator().manual_seed(seed)
        self.mixed.plan(rows)
        order = rows.draft_rows + rows.full_rows
        scores = {}
        for layer in range(LAYERS):
            q = 2 * torch.randn(sum(rows.q_lens), HEADS, DIM, generator=generator)
            read = {
                row: self.listed(layer, rows.slots[row], rows.context_lens[row] - 1)
                for row in rows.draft_rows
            }
            out = torch.empty_like(q)
            self.mixed.attend(SimpleNamespace(layer_id=layer, scaling=SCALE, logit_cap=0.0), q, out)
            start = 0
            for row in order:
                n, length = rows.q_lens[row], rows.context_lens[row]
                whole = torch.arange(length)
                positions = read[row] if rows.draft[row] and layer not in reads_all else whole
                part = q[start : start + n]
                want, _ = self.dense(layer, rows.slots[row], part, positions, length - n)
                torch.testing.assert_close(out[start : start + n], want, atol=2e-5, rtol=1e-4)
                _, probs = self.dense(layer, rows.slots[row], part, whole, length - n)
                voters = probs[[0, n - 1]] if rows.decoding else probs[[n - 1]]
                tokens = voters.amax(1).mean(0, keepdim=True)
                scores[row, layer] = token_scores_to_page_scores(tokens, self.selection.page_size)
                start += n
        return scores

    def own_pages(self, scores: Tensor, length: int, count: int) -> list[int]:
        """The best of the pages that are neither sink nor last."""
        last = self.selection.num_pages(length) - self.selection.last_pages
        free = scores[self.selection.sink_pages : last]
        return sorted((free.topk(count).indices + self.selection.sink_pages).tolist())


def prefill(lens: list[int]) -> ForwardRows:
    return ForwardRows([1, 2, 3], [40, 3, 40], lens, [False] * 3)


def draft(lens: list[int]) -> ForwardRows:
    return ForwardRows([1, 2, 3], [1] * 3, lens, [True] * 3, decoding=True)


def run(model: Model, reads_all: tuple[int, ...]) -> dict:
    """Prefill, two draft steps, and one in which slot 2 verifies; returns the last page scores."""
    model.step(prefill([300, 260, 400]), reads_all, 1)
    model.step(draft([301, 261, 401]), reads_all, 2)
    model.step(draft([302, 262, 402]), reads_all, 3)
    rows = ForwardRows([1, 2, 3], [1, 4, 1], [303, 264, 403], [True, False, True], decoding=True)
    scores = model.step(rows, reads_all, 4)
    model.step(draft([304, 263, 404]), reads_all, 5)
    return scores


@pytest.mark.parametrize("page_size", [1, 4])
def test_hybrid(page_size):
    model = Model("hybrid", page_size)
    scores = run(model, reads_all=(2,))
    lists = model.context.layer_lists
    assert lists is not None
    count = int(lists.own_counts[2])
    free = SELECTION[page_size].min_pages - SELECTION[page_size].sink_pages
    assert count == round(0.5 * (free - SELECTION[page_size].last_pages))
    for layer in range(LAYERS):
        found = sorted(lists.own[2, layer, :count].tolist())
        assert found == model.own_pages(scores[1, layer], 264, count)
    different = {tuple(model.listed(layer, 2, 263).tolist()) for layer in range(LAYERS)}
    assert len(different) == LAYERS
    assert len({len(positions) for positions in different}) == 1


@pytest.mark.parametrize("source", ["hybrid", "last_verify_per_layer"])
@pytest.mark.parametrize("list_layers", [2, 3, 9])
def test_layers_share_the_pages_that_one_of_them_chose(source, list_layers):
    model = Model(source, 1, list_layers=list_layers)
    scores = run(model, reads_all=(2,) if source == "hybrid" else ())
    lists = model.context.layer_lists
    assert lists is not None
    # The refresh layer, 2, speaks for its group; elsewhere the middle layer does.
    voters = {2: (0, 2, 4), 3: (2, 3), 9: (2,)}[list_layers]
    assert model.context.own_voters == voters
    assert [layer for layer in range(LAYERS) if model.context.full_rows_vote(layer)] == [*voters]
    assert lists.own.shape[1] == len(voters)
    count = int(lists.own_counts[2])
    for number, voter in enumerate(voters):
        found = sorted(lists.own[2, number, :count].tolist())
        assert found == model.own_pages(scores[1, voter], 264, count)
    read = [tuple(model.listed(layer, 2, 263).tolist()) for layer in range(LAYERS)]
    assert [read.index(pages) // list_layers for pages in read] == [
        layer // list_layers for layer in range(LAYERS)
    ]


def test_layers_between_votes_are_one_call_of_a_program():
    """Calls end before and behind a layer that votes; of those fewer do than layers read."""
    cut = {}
    for list_layers in (1, 3):
        model = Model("hybrid", 4, list_layers=list_layers)
        model.step(prefill([300, 260, 400]), (2,), 1)
        for verifies in (0, 1):
            rows = ForwardRows(
                [1, 2, 3],
                [1, 1 + verifies, 1],
                [301, 261 + verifies, 401],
                [True, not verifies, True],
                decoding=True,
            )
            cut[list_layers, verifies] = calls(model, rows)
    assert cut == {
        (1, 0): [2, 3, 5],
        (3, 0): [2, 3, 5],
        (1, 1): [1, 2, 3, 4, 5],
        (3, 1): [2, 3, 4, 5],
    }


def calls(model: Model, rows: ForwardRows) -> list[int]:
    """Where the calls of a program that computes whole layers end, attention being compared with
    that of single layers."""
    generator = torch.Generator().manual_seed(9)
    tokens = sum(rows.q_lens)
    q = torch.randn(tokens, HEADS, DIM, generator=generator)
    model.mixed.plan(rows)
    jobs = np.zeros(LAYERS, JOB)
    write_scales(jobs, [SCALE] * LAYERS, [0.0] * LAYERS)
    program = Program(*model.mixed.phases)
    stops, first = [], 0
    while first < LAYERS:
        out = torch.empty_like(q)
        stop, items = model.mixed.prepare(jobs, first, q, out)
        for layer in range(first, stop):
            program.argument[:] = jobs[layer : layer + 1].ctypes.data
            program.items[:] = items
            program.run()
            start = 0
            for row in rows.draft_rows + rows.full_rows:
                n, length, slot = rows.q_lens[row], rows.context_lens[row], rows.slots[row]
                whole = not rows.draft[row] or layer == 2
                read = torch.arange(length) if whole else model.listed(layer, slot, length - 1)
                want, _ = model.dense(layer, slot, q[start : start + n], read, length - n)
                got = out[start : start + n]
                torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-4)
                start += n
        model.mixed.attended(stop - 1)
        stops.append(stop)
        first = stop
    return stops


def test_hybrid_drafts_read_the_new_shared_pages_above_the_refresh_layer_at_once():
    """The reference of a step reads the lists of the moment, so both settings must agree with it;
    they differ in when a list becomes the present one."""
    model = Model("hybrid", 1, same_step=True)
    run(model, reads_all=(2,))
    late = Model("hybrid", 1, same_step=False)
    late.step(prefill([300, 260, 400]), (2,), 1)
    with pytest.raises(AssertionError):
        late.step(draft([301, 261, 401]), (2,), 2)


def test_last_verify_per_layer_reads_own_pages_only():
    model = Model("last_verify_per_layer", 1)
    scores = run(model, reads_all=())
    config = model.selection
    count = config.min_pages - config.sink_pages - config.last_pages
    for layer in range(LAYERS):
        own = model.own_pages(scores[1, layer], 264, count)
        assert model.listed(layer, 2, 263).tolist() == [0, 1, *own, *range(256, 264)]


def test_delta_has_a_list_per_group_of_layers():
    model = Model("delta", 4, group_layers=(1, 3), full_layers=1)
    run(model, reads_all=(0, 1, 3))
    first, second = model.listed(2, 1, 303), model.listed(4, 1, 303)
    assert first.tolist() != second.tolist()


@pytest.mark.parametrize("source", ["refresh", "last_verify", "window"])
def test_shared_lists(source):
    run(Model(source, 4), reads_all=(2,) if source == "refresh" else ())


def test_a_short_prompt_forgets_the_lists_of_its_slot():
    for source, options in (("hybrid", {}), ("delta", {"group_layers": (1, 3)})):
        model = Model(source, 4, **options)
        model.step(prefill([300, 260, 400]), (1, 2, 3), 1)
        model.mixed.plan(ForwardRows([2], [20], [20], [False]))
        window = [*range(4), *range(220, 264)]
        assert model.listed(4, 2, 263).tolist() == window
        assert model.listed(4, 3, 404).tolist() != window


def test_draft_reads_are_counted():
    def tokens(source: str, **options) -> int:
        return Model(source, 4, **options).context.draft_kv(399)

    sparse = 48
    assert tokens("window") == tokens("last_verify_per_layer") == sparse
    assert tokens("refresh") == tokens("hybrid") == (4 * sparse + 400) // 5
    delta = tokens("delta", group_layers=(1, 3), full_layers=1)
    assert delta == (2 * sparse + 3 * 400) // 5


def test_a_list_that_a_row_does_not_have_is_refused():
    attention = CpuAttention(HEADS, KV_HEADS, SLOTS * WIDTH, DIM, torch.float32)
    plan = attention.plan([Row(torch.zeros(3, 8, dtype=torch.int32), 1)])
    q, pool = torch.zeros(1, HEADS, DIM), torch.zeros(KV_HEADS, SLOTS * WIDTH, DIM)
    attention.attend(q, pool, pool, plan, SCALE, number=2)
    with pytest.raises(ValueError, match="list 3 of rows with 3 lists of slots"):
        attention.attend(q, pool, pool, plan, SCALE, number=3)


def test_slots_of_every_list_are_checked():
    attention = CpuAttention(HEADS, KV_HEADS, SLOTS * WIDTH, DIM, torch.float32)
    slots = torch.zeros(3, 8, dtype=torch.int32)
    slots[2, 5] = SLOTS * WIDTH
    with pytest.raises(ValueError, match="slots 0 to"):
        attention.plan([Row(slots, 1)])
