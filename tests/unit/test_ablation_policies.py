"""The policies that leave something out, and the part of the protocol that they share."""

from dataclasses import replace

import pytest

from aspire_sglang.speculation.ablations import (
    ConstantCostPolicy,
    FeedbackPolicy,
    adjusted_length,
)
from aspire_sglang.speculation.cost_model import CostModel
from aspire_sglang.speculation.policies import RowState, make_policy

COST = CostModel(1e-3, 1e-5, 1e-8)
ROW = RowState(committed=5000, pending=0, draft_kv=500, rate=0.9, max_draft=16, verifies=3)


def length_of(policy, row: RowState) -> int:
    """Drafts at which the policy asks for a verify."""
    for pending in range(17):
        if policy.decide([replace(row, pending=pending)], COST)[0]:
            return pending
    raise AssertionError("no verify")


def test_feedback_moves_by_one():
    assert adjusted_length(4, 4, 4) == 5
    assert adjusted_length(4, 4, 2) == 4
    assert adjusted_length(4, 4, 1) == 3
    assert adjusted_length(1, 1, 0) == 1


def test_a_run_cut_short_says_nothing_about_a_longer_one():
    assert adjusted_length(9, 4, 4) == 9


@pytest.mark.parametrize(("length", "cap", "expected"), [(5, 16, 5), (40, 16, 12), (5, 3, 3)])
def test_feedback_length_is_bounded(length, cap, expected):
    row = replace(ROW, length=length, max_draft=cap)
    assert length_of(FeedbackPolicy(gamma_max=12), row) == expected


def test_constant_cost_is_blind_to_contexts():
    policy = ConstantCostPolicy(cost_ratio=0.2)
    lengths = {length_of(policy, replace(ROW, committed=s, draft_kv=s // 10)) for s in (90, 90_000)}
    assert len(lengths) == 1
    assert length_of(policy, replace(ROW, rate=0.99)) > length_of(policy, ROW) > 0


@pytest.mark.parametrize("ratio", [0.05, 0.2, 0.6])
@pytest.mark.parametrize("rate", [0.5, 0.9, 0.98])
def test_constant_cost_maximizes_its_objective(ratio, rate):
    value = [sum(rate**j for j in range(g + 1)) / (1 + ratio * g) for g in range(17)]
    best = max(range(17), key=value.__getitem__)
    assert length_of(ConstantCostPolicy(cost_ratio=ratio), replace(ROW, rate=rate)) == best


def test_a_first_draft_is_short():
    row = replace(ROW, rate=0.99, verifies=0)
    assert length_of(ConstantCostPolicy(first_draft=2), row) == 2


def test_bad_options_are_refused():
    with pytest.raises(ValueError, match="cost_ratio"):
        ConstantCostPolicy(cost_ratio=0.0)
    with pytest.raises(ValueError, match="gamma_max"):
        FeedbackPolicy(gamma_max=0)


@pytest.mark.parametrize("name", ["ar", "fixed", "staggered", "global", "shadow_price", "feedback"])
def test_policies_that_are_asked_at_every_step_do_not_plan(name):
    policy = make_policy(name)
    assert not policy.plans
    with pytest.raises(NotImplementedError, match="step by step"):
        policy.plan([ROW], COST, 1, False)


def test_the_papers_rule_plans():
    policy = make_policy("aspire", probe_interval=8)
    assert policy.plans
    assert policy.plan([ROW], COST, 1, False) == [length_of(policy, ROW)]
    assert [policy.until_probe(verifies) for verifies in (0, 5, 6, 7)] == [6, 1, 0, 7]
