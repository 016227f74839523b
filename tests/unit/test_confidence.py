"""Calibration of draft probabilities, and the draft lengths that follow from it."""

from __future__ import annotations

import random

import pytest

from aspire_sglang.speculation.confidence import ConfidenceCalibration
from aspire_sglang.speculation.cost_model import CostModel
from aspire_sglang.speculation.policies import AspirePolicy, RowState


def learnt(rate_of, rounds: int = 3000) -> ConfidenceCalibration:
    """A calibration that has seen runs of six drafts, accepted with ``rate_of(probability)``."""
    rng = random.Random(0)
    calibration = ConfidenceCalibration()
    for _ in range(rounds):
        run = [rng.choice((0.3, 0.7, 0.99)) for _ in range(6)]
        accepted = 0
        while accepted < 6 and rng.random() < rate_of(run[accepted]):
            accepted += 1
        calibration.observe(run, accepted)
    return calibration


def test_rates_follow_what_was_accepted_not_the_probability_itself():
    rates = {0.3: 0.6, 0.7: 0.85, 0.99: 0.97}
    calibration = learnt(rates.__getitem__)
    for probability, rate in rates.items():
        assert calibration.rate(probability, expected=0.5) == pytest.approx(rate, abs=0.05)
    survival = calibration.survival([0.99, 0.3], expected=0.5)
    assert survival == pytest.approx(0.97 * 0.6, abs=0.06)


def test_without_evidence_the_expected_rate_holds():
    calibration = ConfidenceCalibration()
    assert calibration.rate(0.4, expected=0.8) == pytest.approx(0.8)
    assert calibration.survival([], expected=0.8) == 1.0


def test_nothing_is_learnt_behind_a_rejection():
    calibration = ConfidenceCalibration(prior_strength=1.0)
    calibration.observe([0.99, 0.3, 0.7], accepted=1)
    assert calibration.rate(0.7, expected=0.5) == 0.5
    assert calibration.rate(0.3, expected=0.5) == 0.25
    assert calibration.rate(0.99, expected=0.5) == 0.75


@pytest.mark.parametrize("probability", [0.0, 0.5, 1.0 - 1e-9, 1.0])
def test_every_probability_has_a_bin(probability):
    assert 0.0 < ConfidenceCalibration(bins=3).rate(probability, 0.9) < 1.0


@pytest.mark.parametrize(("run", "accepted"), [([0.5], 2), ([0.5], -1), ([], 1)])
def test_impossible_verifies_are_refused(run, accepted):
    with pytest.raises(ValueError, match="accepted must be in"):
        ConfidenceCalibration().observe(run, accepted)


@pytest.mark.parametrize("options", [{"bins": 0}, {"memory": 0.5}, {"prior_strength": 0.0}])
def test_options_are_checked(options):
    with pytest.raises(ValueError, match="must be"):
        ConfidenceCalibration(**options)


def row(pending: int, survival: float | None) -> RowState:
    return RowState(
        committed=6000,
        pending=pending,
        draft_kv=512,
        rate=0.95,
        max_draft=16,
        verifies=3,
        survival=survival,
    )


def test_a_doubtful_run_is_verified_early_and_a_sure_one_goes_on():
    cost = CostModel(fixed=0.02, per_token=1e-3, per_kv=2e-6, per_pair=5e-7)
    policy = AspirePolicy(gamma_max=16)
    best = policy.best_lengths([row(0, None)], cost)[0]
    assert 2 < best < 14

    def verifies(pending: int, survival: float | None) -> bool:
        return policy.decide([row(pending, survival)], cost)[0]

    # What is expected of the run on average changes nothing: the rule is the paper's.
    for pending in range(17):
        assert verifies(pending, None) == (pending >= best)
        assert verifies(pending, 0.95**pending) == (pending >= best)
    assert verifies(best - 1, 0.2)
    assert not verifies(best, 0.999)
    assert verifies(16, 1.0), "a sure run still ends at gamma_max"
