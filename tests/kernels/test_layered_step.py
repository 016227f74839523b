"""The GPU's mixed step with page lists per layer or group of layers, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from aspire_sglang.attention import gpu_layered, gpu_mixed
from aspire_sglang.attention.gpu_layered import GpuLayeredAttention
from aspire_sglang.attention.gpu_mixed import GpuMixedAttention
from aspire_sglang.attention.step_buffers import HostStep
from aspire_sglang.context.selection import SelectionConfig
from aspire_sglang.context.sparse import RefreshConfig, SparseContext
from tests.kernels.step_model import SELECTION, WIDTH, Model, attention, lay_out

LAYERED = {
    "hybrid": RefreshConfig("hybrid", 1, True),
    "hybrid next step": RefreshConfig("hybrid", 1, False),
    "hybrid, two layers a list": RefreshConfig("hybrid", 2, True, list_layers=2),
    "hybrid, two layers a list, next step": RefreshConfig("hybrid", 2, False, list_layers=2),
    "hybrid, three layers a list": RefreshConfig("hybrid", 1, True, 0.25, list_layers=3),
    "hybrid, refreshed by the last layer": RefreshConfig("hybrid", 4, True, list_layers=2),
    "hybrid, one list": RefreshConfig("hybrid", 3, True, 0.75, list_layers=9),
    "last verify per layer": RefreshConfig("last_verify_per_layer", 1, True),
    "last verify per two layers": RefreshConfig("last_verify_per_layer", 1, True, list_layers=2),
}
PAGES = {
    16: SELECTION,
    8: SelectionConfig(page_size=8, min_pages=10, ratio=0.1, last_pages=3),
    1: SelectionConfig(page_size=1, min_pages=60, ratio=0.1, sink_pages=4, last_pages=12),
}


def run_steps(model: Model) -> None:
    model.prefill([1, 2], [230, 75])
    model.prefill([4, 3], [175, 291])
    model.step([1, 2, 4, 3], [230, 75, 175, 291], [0, 0, 0, 0], [False] * 4, pad=2)
    model.step([1, 2, 4, 3], [230, 75, 175, 291], [1, 1, 1, 1], [False, True, False, True], pad=1)
    # Of request 3 one draft was accepted, of request 2 none: contexts shrink.
    model.step([1, 2, 4, 3], [230, 76, 175, 293], [2, 0, 2, 0], [True, True, False, False])
    model.step([2, 4], [77, 175], [0, 3], [True, True], pad=3)
    # Request 1 drafts again, from what it found when it verified.
    model.step([2, 4, 1], [78, 177, 231], [0, 0, 0], [False, False, False])


SMALL_PAGES = [
    (name, page, kv_page)
    for name in ("hybrid, two layers a list", "last verify per two layers")
    for page, kv_page in ((16, 16), (8, 1), (1, 1))
]


# Every launch takes the interpreter a second or two, so some settings are left to the slow run.
ALWAYS = {
    ("hybrid", 16, 1),
    ("hybrid, two layers a list, next step", 16, 1),
    ("hybrid, one list", 16, 1),
    ("hybrid, two layers a list", 1, 1),
    ("hybrid, two layers a list", 16, 16),
    ("last verify per two layers", 8, 1),
}
SETTINGS = [
    pytest.param(*setting, marks=() if setting in ALWAYS else pytest.mark.slow)
    for setting in [*((name, 16, 1) for name in LAYERED), *SMALL_PAGES]
]


@pytest.mark.parametrize(("name", "page", "kv_page"), SETTINGS)
def test_lists_per_layer_equal_the_cpu_implementation(name, page, kv_page):
    model = Model(kv_page, LAYERED[name], selection=PAGES[page], layers=5)
    run_steps(model)
    # Layers did read differently, or the comparison would say little.
    lists = model.gpu.context.layer_lists
    own = lists.own[4, :, : lists.own_counts[4]]
    different = {tuple(pages) for pages in own.sort(-1).values.tolist()}
    assert len(different) > 1 or len(own) == 1


@pytest.mark.parametrize(
    "refresh",
    [
        pytest.param(refresh, id=name, marks=() if (name, 16, 1) in ALWAYS else pytest.mark.slow)
        for name, refresh in LAYERED.items()
    ],
)
def test_a_budget_that_covers_everything_reads_everything(refresh):
    whole = SelectionConfig(page_size=16, min_pages=WIDTH // 16, ratio=1.0, last_pages=2)
    model = Model(1, refresh, selection=whole, layers=5)
    slots, lens = [1, 4], [230, 175]
    ends = torch.tensor([1, 2])
    model.gpu.plan_prefill(torch.tensor(slots), torch.tensor(lens), ends)
    host = HostStep.build(slots, [0, 0], [False, False])
    view = lay_out(model.buffers, host, 3, 3, torch.tensor(lens), model.state, model.table)
    model.gpu.plan(view)
    for layer in model.layers():
        number, q = layer.layer_id, model.queries(3)
        got = torch.zeros_like(q)
        model.gpu.attend(layer, q, model.k[number], model.v[number], got)
        for row, slot in enumerate(slots):
            want, _ = attention(model, number, slot, q[row], torch.arange(lens[row] + 1))
            torch.testing.assert_close(got[row], want, atol=2e-5, rtol=2e-5)


def test_draft_rows_of_a_list_per_layer_are_scored_at_the_refresh_layer_only(monkeypatch):
    voted = []
    original = gpu_mixed.page_scores

    def counted(q, lse, k, table, rows, out, **options):
        voted.append(rows.slots.tolist())
        return original(q, lse, k, table, rows, out, **options)

    monkeypatch.setattr(gpu_mixed, "page_scores", counted)
    model = Model(1, LAYERED["hybrid, two layers a list"], layers=5)
    model.prefill([1, 2], [230, 75])
    voted.clear()
    model.step([1, 2], [230, 75], [0, 2], [False, True], pad=1)
    # Groups (0, 1), (2, 3) and (4,); the refresh layer, 2, speaks for its own.
    assert voted == [[-1, 2, -1], [1, 2, -1], [-1, 2, -1]]


def test_tables_of_all_lists_are_two_launches(monkeypatch):
    asked = []
    original = gpu_layered.build_layer_tables

    def counted(*given, **options):
        asked.append((options["draft_lists"], options["full_rows"]))
        original(*given, **options)

    monkeypatch.setattr(gpu_layered, "build_layer_tables", counted)
    for refresh, wanted in (
        (LAYERED["hybrid"], [(range(2), True), (range(2, 5), False)]),
        (LAYERED["hybrid, two layers a list"], [(range(2), True), (range(1, 3), False)]),
        (LAYERED["hybrid next step"], [(range(5), True)]),
        (LAYERED["hybrid, refreshed by the last layer"], [(range(3), True)]),
        (LAYERED["last verify per two layers"], [(range(3), True)]),
    ):
        model = Model(16, refresh, layers=5)
        # Longer than the budget, but a single block.
        model.prefill([1, 2], [120, 75])
        asked.clear()
        model.step([1, 2], [120, 75], [0, 2], [False, True], pad=1)
        assert asked == wanted


def test_groups_of_layers_that_refresh_are_refused():
    with pytest.raises(ValueError, match="selection delta runs on a CPU only"):
        Model(16, RefreshConfig("delta", 1, True, group_layers=(0, 2)))


def test_lists_that_layers_share_are_not_layered():
    with pytest.raises(ValueError, match="refresh has no list per layer"):
        GpuLayeredAttention(
            None,  # type: ignore[arg-type]
            SparseContext(
                SELECTION,
                RefreshConfig("refresh", 1, True),
                num_layers=3,
                num_slots=2,
                context_len=64,
            ),
            max_rows=2,
        )
    shared = Model(16, RefreshConfig("refresh", 1, True)).gpu
    assert type(shared) is GpuMixedAttention
