"""A request's own switch for speculation."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from aspire_sglang.runtime.switch import check_custom_params, draft_limit
from aspire_sglang.runtime.worker import AspireWorker


@pytest.mark.parametrize(
    ("wish", "limit"),
    [
        (None, None),
        ({}, None),
        ({"aspire": None}, None),
        ({"aspire": True}, None),
        ({"aspire": {}}, None),
        ({"aspire": {"gamma_max": None}}, None),
        ({"aspire": False}, 0),
        ({"aspire": {"gamma_max": 0}}, 0),
        ({"aspire": {"gamma_max": 4}}, 4),
        ({"aspire": {"gamma_max": 16}}, 16),
    ],
)
def test_limit(wish, limit):
    check_custom_params(wish, has_processor=False, most=16)
    assert draft_limit(wish) == limit


@pytest.mark.parametrize(
    ("wish", "names"),
    [
        ("off", ["custom_params", "'off'"]),
        ({"asprie": False}, ["'asprie'", "'aspire'"]),
        ({"aspire": "off"}, ["custom_params.aspire", "'off'"]),
        ({"aspire": 0}, ["custom_params.aspire"]),
        ({"aspire": 4}, ["custom_params.aspire"]),
        ({"aspire": {"gama_max": 4}}, ["'gama_max'", "'gamma_max'"]),
        ({"aspire": {"gamma_max": -1}}, ["gamma_max", "-1"]),
        ({"aspire": {"gamma_max": 2.0}}, ["gamma_max", "2.0"]),
        ({"aspire": {"gamma_max": True}}, ["gamma_max", "True"]),
        ({"aspire": {"gamma_max": "4"}}, ["gamma_max", "'4'"]),
        ({"aspire": {"gamma_max": 17}}, ["gamma_max is 17", "at most 16"]),
    ],
)
def test_bad_switch_is_refused_with_the_valid_name(wish, names):
    with pytest.raises(ValueError, match="custom_params") as refused:
        check_custom_params(wish, has_processor=False, most=16)
    assert [name for name in names if name not in str(refused.value)] == []


def test_entries_of_logit_processors_and_of_sglang_pass():
    check_custom_params({"anything": 1}, has_processor=True, most=16)
    check_custom_params({"thinking_budget": 1}, has_processor=False, most=16)
    with pytest.raises(ValueError, match="off"):
        check_custom_params({"aspire": "off", "anything": 1}, has_processor=True, most=16)


@pytest.mark.parametrize(
    ("wish", "most"), [(None, 16), ({"aspire": False}, 0), ({"aspire": {"gamma_max": 4}}, 4)]
)
def test_limit_bounds_the_drafts_of_a_row(wish, most):
    worker = SimpleNamespace(gamma_max=16, context_len=100)
    sampling = SimpleNamespace(custom_params=wish, max_new_tokens=50)
    req = SimpleNamespace(to_finish=None, sampling_params=sampling, output_ids=[1])
    assert AspireWorker._max_draft(worker, req, 10) == most
    # The other bounds hold beside it.
    assert AspireWorker._max_draft(worker, req, 97) == min(most, 2)
    sampling.max_new_tokens = 3
    assert AspireWorker._max_draft(worker, req, 10) == min(most, 1)
