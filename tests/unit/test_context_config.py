"""From the section ``context`` of the configuration to the sparse contexts of a model."""

from types import SimpleNamespace

import pytest
import torch

from aspire_sglang.attention.backend import sparse_context
from aspire_sglang.config import ConfigError, parse_config
from aspire_sglang.runtime.worker import check_for_ranks


def built(**context):
    runner = SimpleNamespace(
        model_config=SimpleNamespace(num_hidden_layers=30),
        req_to_token_pool=SimpleNamespace(req_to_token=torch.zeros(3, 2000, dtype=torch.int32)),
        device="cpu",
    )
    return sparse_context(runner, parse_config({"context": context}, "a test").context)


@pytest.mark.parametrize(
    ("selection", "per_layer", "said"),
    [
        ("refresh", False, "refreshed at every draft by layer 14"),
        ("last_verify", False, "chosen at verify steps by layer 14"),
        ("window", False, "most recent"),
        ("hybrid", True, "50% chosen by the layer at verify steps, the rest refreshed"),
        ("last_verify_per_layer", True, "per layer, chosen by the layer"),
        ("delta", False, "by layers 7, 15, 22"),
    ],
)
def test_every_selection_is_built_and_described(selection, per_layer, said):
    context = built(selection=selection)
    assert said in context.describe()
    assert (context.layer_lists is not None) == per_layer
    context.clear()
    context.forget([1, 2])
    if per_layer:
        with pytest.raises(RuntimeError, match=f"{selection} has a list per layer"):
            _ = context.lists
    else:
        assert context.lists.counts.shape == (3 * (3 if selection == "delta" else 1),)


def test_options_arrive():
    hybrid = built(selection="hybrid", own_share=0.25, page_size=8, min_pages=64)
    assert hybrid.layer_lists is not None
    assert hybrid.layer_lists.own_share == 0.25
    shared = built(selection="hybrid", list_layers=4, refresh_layer=13)
    assert shared.own_voters == (1, 5, 9, 13, 17, 21, 25, 28)
    assert "per 4 layers, 50% chosen by one of them" in shared.describe()
    assert hybrid.own_voters == tuple(range(30))
    delta = built(selection="delta", refresh_layers=[4, 9], full_layers=2)
    read_all = [layer for layer in range(30) if delta.draft_rows_read_all(layer)]
    assert read_all == [0, 1, 4, 9]


def test_layers_must_exist():
    with pytest.raises(ValueError, match="refresh_layers 30 does not exist"):
        built(selection="delta", refresh_layers=[4, 30])
    with pytest.raises(ValueError, match="refresh_layer 30 does not exist"):
        built(selection="hybrid", refresh_layer=30)


@pytest.mark.parametrize(
    ("section", "option"),
    [
        ({"context": {"selection": "hybrid"}}, "context.selection hybrid"),
        ({"context": {"selection": "delta"}}, "context.selection delta"),
        ({"scheduler": {"predictor": "regression"}}, "scheduler.predictor regression"),
    ],
)
def test_several_ranks_refuse_what_they_do_not_agree_on(section, option):
    config = parse_config(section, "a test")
    check_for_ranks(config, SimpleNamespace(alone=True))
    with pytest.raises(ConfigError, match=f"{option} runs without tensor parallelism only"):
        check_for_ranks(config, SimpleNamespace(alone=False))
    check_for_ranks(parse_config({}, "a test"), SimpleNamespace(alone=False))
