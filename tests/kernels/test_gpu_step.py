"""The GPU's mixed step in Triton's interpreter: layout of the rows, and attention with refresh
against the CPU implementation."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from aspire_sglang.attention.step_buffers import HostStep, StepBuffers, pack_step
from aspire_sglang.context.selection import select_pages
from aspire_sglang.context.sparse import RefreshConfig
from tests.kernels.step_model import WIDTH, Model, attention, lay_out, logits_of


def test_rows_that_are_left_out():
    step = HostStep.build([1, 2, 3, 4], [0, 2, 3, 5], [False, True, False, True], left_out=[2, 3])
    assert (step.num_drafts, step.num_tokens) == (1, 4)
    assert (step.draft_rows, step.verify_rows) == ([0], [1])
    packed = pack_step(step, 3, 4, drafts_vote=True)
    view = StepBuffers(4, 20, "cpu").load(packed, 3, 4)
    assert view.slots.tolist() == [1, 2, -1]
    assert view.token_row.tolist() == [0, 1, 1, 1]


def test_steps_that_a_graph_holds_lie_where_it_reads():
    buffers = StepBuffers(4, 20, "cpu")
    before = buffers.view(2, 8)
    graph = [torch.zeros(10, dtype=torch.int64) for _ in range(3)]
    buffers.adopt(*graph)
    small, large = buffers.view(2, 8), buffers.view(4, 20)
    assert buffers.adopted
    found = small.input_ids, small.positions, small.out_cache_loc
    for view, place in zip(found, graph, strict=True):
        assert view.data_ptr() == place.data_ptr()
        assert view.shape == (8,)
    assert large.input_ids.data_ptr() == before.input_ids.data_ptr() != graph[0].data_ptr()
    assert small.token_row.data_ptr() == before.token_row.data_ptr()


def test_layout_with_padding():
    table = (torch.arange(5).view(5, 1) * 1000 + torch.arange(200).view(1, 200)).int()
    state = SimpleNamespace(
        bonus=torch.tensor([0, 7000, 7001, 7002, 7003]),
        drafts=torch.arange(5).view(5, 1) * 100 + torch.arange(1, 9).view(1, 8),
        pending=torch.zeros(5, dtype=torch.int64),
    )
    step = HostStep.build([1, 2, 3, 4], [0, 2, 3, 0], [False, True, False, True])
    assert (step.num_drafts, step.num_tokens) == (2, 6)
    assert (step.draft_rows, step.verify_rows) == ([0, 2], [1, 3])
    buffers = StepBuffers(8, 40, "cpu")
    view = lay_out(buffers, step, 6, 9, torch.tensor([10, 20, 30, 40]), state, table)
    # As in the CPU's plan of the same step, then padding.
    assert view.input_ids.tolist() == [7000, 303, 7001, 201, 202, 7003, 0, 0, 0]
    assert view.positions.tolist() == [10, 33, 20, 21, 22, 40, 0, 0, 0]
    assert view.out_cache_loc.tolist() == [1010, 3033, 2020, 2021, 2022, 4040, 0, 0, 0]
    assert view.slots.tolist() == [1, 3, 2, 4, -1, -1]
    assert view.order.tolist()[:4] == [0, 2, 1, 3]
    assert view.draft.tolist() == [1, 1, 0, 0, 0, 0]
    assert view.cu_seqlens_q.tolist() == [0, 1, 2, 5, 6, 6, 6]
    assert view.voters.tolist() == [[0, -1], [1, -1], [2, 4], [5, -1], [-1, -1], [-1, -1]]
    assert view.row_lens.tolist()[:4] == [10, 30, 20, 40]
    assert view.context_lens.tolist() == [11, 34, 23, 41, 0, 0]
    assert state.pending.tolist() == [0, 0, 2, 3, 0]
    assert view.voting.tolist() == [1, 3, 2, 4, -1, -1]
    assert view.verifying.tolist() == [-1, -1, 2, 4, -1, -1]


def test_addresses_stay_and_are_aligned():
    buffers = StepBuffers(9, 50, "cpu")
    first, again = buffers.view(5, 7), buffers.view(5, 7)
    for name in ("slots", "cu_seqlens_q", "voters", "token_step"):
        address = getattr(first, name).data_ptr()
        assert address == getattr(again, name).data_ptr()
        assert (address - first.slots.data_ptr()) % 16 == 0
    with pytest.raises(ValueError, match="does not fit"):
        buffers.view(10, 7)


def test_draft_rows_may_keep_their_vote():
    step = HostStep.build([1, 2], [1, 1], [False, True])
    buffers = StepBuffers(4, 8, "cpu")
    view = buffers.load(pack_step(step, 3, 4, drafts_vote=False), 3, 4)
    assert view.voting.tolist() == [-1, 2, -1]


SOURCES = {
    "same-step": RefreshConfig("refresh", 1, same_step=True),
    "next-step": RefreshConfig("refresh", 0, same_step=False),
    "last-verify": RefreshConfig("last_verify", 1, same_step=True),
    "window": RefreshConfig("window", 1, same_step=True),
}
# The size of a page and where lists come from meet only where tables are refreshed within a step.
ALWAYS = (("same-step", 1), ("same-step", 16), ("next-step", 1), ("last-verify", 16), ("window", 1))


@pytest.mark.parametrize(
    ("refresh", "page"),
    [
        pytest.param(
            refresh,
            page,
            id=f"{name}-{page}",
            marks=() if (name, page) in ALWAYS else pytest.mark.slow,
        )
        for name, refresh in SOURCES.items()
        for page in (1, 16)
    ],
)
def test_equals_the_cpu_implementation(page, refresh):
    model = Model(page, refresh)
    model.prefill([1, 2], [230, 40])
    model.prefill([4, 3], [175, 291])
    model.step([1, 2, 4, 3], [230, 40, 175, 291], [0, 0, 0, 0], [False] * 4, pad=2)
    model.step([1, 2, 4, 3], [230, 40, 175, 291], [1, 1, 1, 1], [False, True, False, True], pad=1)
    model.step([1, 2, 4, 3], [230, 42, 175, 292], [2, 0, 2, 0], [True, True, False, False])
    model.step([2, 4], [43, 175], [0, 3], [True, True], pad=3)


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("same_step", [True, False], ids=["same-step", "next-step"])
def test_draft_rows_score_everything_and_attend_to_their_list(page, same_step):
    model = Model(page, RefreshConfig("refresh", 1, same_step), reads_all=False)
    slots, lens = [1, 4], [230, 175]
    model.prefill(slots, lens)
    lists = model.gpu.context.lists
    host = HostStep.build(slots, [0, 0], [False, False])
    view = lay_out(model.buffers, host, 3, 3, torch.tensor(lens), model.state, model.table)
    model.gpu.plan(view)

    def listed() -> list[torch.Tensor]:
        # A row's last position is that of its query.
        found = lists.draft_positions(torch.tensor(slots), torch.tensor(lens))
        return [row[:count] for row, count in zip(*found, strict=True)]

    in_use = listed()
    for layer in model.layers():
        number, q = layer.layer_id, model.queries(3)
        got, scores = torch.zeros_like(q), []
        model.gpu.attend(layer, q, model.k[number], model.v[number], got)
        for row, slot in enumerate(slots):
            want, lse = attention(model, number, slot, q[row], in_use[row])
            torch.testing.assert_close(got[row], want, atol=2e-5, rtol=2e-5)
            everything = torch.arange(lens[row] + 1)
            logits = logits_of(model, number, slot, q[row], everything)
            votes = torch.nn.functional.pad((logits - lse[:, None]).exp().amax(0), (0, 320))
            scores.append(votes[:WIDTH].view(-1, 16).sum(1))
        assert not got[2:].any()
        if number == 1:
            counts = torch.tensor(lens) + 1
            best = select_pages(torch.stack(scores), counts, lists.config)
            found = lists.pages[slots][:, : best.pages.shape[1]]
            assert found.tolist() == best.pages.tolist()
            if same_step:
                in_use = listed()


def test_pages_that_do_not_nest_are_refused():
    with pytest.raises(ValueError, match="multiple"):
        Model(64, RefreshConfig("window", 1, same_step=True))


def test_step_order_is_stable():
    step = HostStep.build([5, 6, 7], [0, 0, 0], [True, False, True])
    assert np.array_equal(step.order, [1, 0, 2])
