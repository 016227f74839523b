"""Page choice and page tables in Triton's interpreter, against the torch rules they replace."""

import pytest
import torch

from aspire_sglang.context import PageLists, SelectionConfig
from aspire_sglang.context import select_pages as torch_select_pages
from aspire_sglang.kernels.page_selection import select_pages
from aspire_sglang.kernels.page_tables import build_tables
from tests.kernels import cases

SHAPES = pytest.mark.parametrize("shape", cases.LIST_SHAPES.values(), ids=cases.LIST_SHAPES)


@SHAPES
@pytest.mark.parametrize("kind", cases.SCORES)
def test_select_pages(shape, kind):
    cases.check_select_pages(shape, kind, "cpu")


@SHAPES
def test_select_pages_equals_the_torch_selection(shape):
    case = cases.lists(shape, "cpu")
    scores = cases.scores_of("random", len(shape.lens), case.width, "cpu")
    select_pages(scores, case.lens, case.slots, case.lists)
    want = torch_select_pages(scores, case.lens, shape.config)
    real = case.slots >= 0
    slots = case.slots[real].long()
    assert case.lists.counts[slots].tolist() == want.counts[real].tolist()
    got = case.lists.pages[slots][:, : want.pages.shape[1]]
    assert got.tolist() == want.pages[real].tolist()


@pytest.mark.parametrize("ratio", [0.07, 0.1, 0.29, 1 / 3])
def test_budgets_equal_the_hosts(ratio):
    config = SelectionConfig(page_size=1, min_pages=3, ratio=ratio, last_pages=1)
    lens = torch.arange(1, 301, 13)
    lists = PageLists(len(lens), config.budget_pages(300), config)
    select_pages(torch.rand(len(lens), 300), lens, torch.arange(len(lens)), lists)
    want = [min(config.budget_pages(int(n)), int(n)) for n in lens]
    assert lists.counts.tolist() == want


# Without lists only the length counts, and the shapes have lengths of every kind.
@SHAPES
@pytest.mark.parametrize(("growth", "listed"), [(0, True), (5, True), (40, True), (0, False)])
def test_build_tables(shape, growth, listed):
    cases.check_build_tables(shape, "cpu", growth, listed)


@SHAPES
def test_refresh_tables(shape):
    cases.check_refresh_tables(shape, "cpu")


def test_pages_that_cannot_be_expressed_are_refused():
    shape = cases.ListShape((100,))
    case = cases.lists(shape, "cpu")
    table, lens = case.outputs(1)
    draft = torch.ones(1, dtype=torch.bool)
    with pytest.raises(ValueError, match="multiple of the KV page size"):
        build_tables(
            case.req_to_token, case.slots, case.lens, draft, case.lists, table, lens,
            kv_page_size=64,
        )  # fmt: skip
    with pytest.raises(ValueError, match="no room"):
        build_tables(
            case.req_to_token, case.slots, case.lens, draft, case.lists, table[:, :50], lens
        )
    with pytest.raises(ValueError, match="do not fit"):
        select_pages(torch.rand(1, 4000), case.lens, case.slots, case.lists)
