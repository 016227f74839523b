"""Lists per layer in Triton's interpreter, against the definitions in torch."""

import pytest
import torch

from aspire_sglang.kernels.layer_selection import select_own, select_shared
from aspire_sglang.kernels.layer_tables import build_layer_tables
from tests.kernels import cases, layer_cases

SHAPES = pytest.mark.parametrize(
    "shape", layer_cases.LAYER_SHAPES.values(), ids=layer_cases.LAYER_SHAPES
)
NO_TABLES = range(0)


@SHAPES
@pytest.mark.parametrize("kind", cases.SCORES)
def test_selection(shape, kind):
    layer_cases.check_selection(shape, kind, "cpu")


@SHAPES
def test_selection_equals_the_definition(shape):
    layer_cases.check_selection_equals_the_definition(shape, "cpu")


# Without lists only the length counts, and the shapes have lengths of every kind.
@SHAPES
@pytest.mark.parametrize(
    ("growth", "listed"), [(-60, True), (-3, True), (0, True), (40, True), (0, False)]
)
def test_tables(shape, growth, listed):
    layer_cases.check_tables(shape, "cpu", growth, listed)


@pytest.mark.parametrize("full_rows", [True, False])
@pytest.mark.parametrize("lists", [range(2), range(1, 3), range(2, 3), NO_TABLES])
def test_what_is_not_asked_for_is_left_alone(lists, full_rows):
    shape = layer_cases.LAYER_SHAPES["short and long"]
    layer_cases.check_tables(shape, "cpu", 5, True, draft_lists=lists, full_rows=full_rows)


@pytest.mark.parametrize(
    "share",
    [
        pytest.param(k / 16, marks=() if k in (1, 6, 7, 16) else pytest.mark.slow)
        for k in range(1, 17)
    ],
)
def test_shares_round_as_the_definition_does(share):
    # Halves, too: 11 free pages by sixteenths.
    for min_pages in (11, 12, 14):
        shape = layer_cases.LayerShape((700,), min_pages=min_pages, ratio=0.0, own_share=share)
        layer_cases.check_selection_equals_the_definition(shape, "cpu")


def test_wrong_arguments_are_named():
    shape = layer_cases.LayerShape((100, 300))
    case = layer_cases.inputs_of(shape, "cpu")
    scores = layer_cases.layer_scores("random", case, "cpu")
    given = (case.lens, case.slots, case.lists, case.scratch())
    with pytest.raises(ValueError, match=r"must be \[3, n, P\]"):
        select_own(scores[:2], *given)
    with pytest.raises(ValueError, match="scratch must hold"):
        select_shared(scores[0], *given[:3], case.scratch()[:5])
    with pytest.raises(ValueError, match="do not fit"):
        select_shared(torch.rand(2, 4000), *given)
    with pytest.raises(ValueError, match="float32"):
        select_own(scores.double(), *given)
    tables = torch.zeros(3, 2, 310, dtype=torch.int32)
    lens = torch.zeros(2, dtype=torch.int32)
    draft = torch.ones(2, dtype=torch.bool)
    rows = (case.req_to_token, case.slots, case.lens, draft, case.lists)
    with pytest.raises(ValueError, match=r"must be \[3, n, W\]"):
        build_layer_tables(*rows, tables[:1], lens)
    with pytest.raises(ValueError, match="multiple of the KV page size"):
        build_layer_tables(*rows, tables, lens, kv_page_size=64)
    with pytest.raises(ValueError, match="not lists among 3"):
        build_layer_tables(*rows, tables, lens, draft_lists=range(2, 4))
