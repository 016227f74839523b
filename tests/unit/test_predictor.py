"""The online predictor of acceptance, and how predictors are judged."""

import math
import random

import numpy as np
import pytest

from aspire_sglang.speculation.predictor import FEATURES, AcceptancePredictor, features
from bench.predictors import PREDICTORS, auc, calibration_error, judge, runs_of


def test_features_are_finite_at_the_ends():
    for probability in (0.0, 0.5, 1.0):
        for rate in (0.01, 0.995):
            token = features(probability, math.inf, 16, rate)
            assert token.shape == (len(FEATURES),)
            assert np.isfinite(token).all()


def test_without_evidence_it_tells_the_recent_rate():
    predictor = AcceptancePredictor()
    for rate in (0.2, 0.9, 0.99):
        assert predictor.rate(features(0.7, 1.0, 3, rate)) == pytest.approx(rate)


def test_it_learns_what_decides():
    """Tokens of a wide gap are accepted nine times in ten, others every second time."""
    rng = random.Random(0)
    predictor = AcceptancePredictor()
    for _ in range(600):
        tokens = [features(0.8, rng.choice([0.5, 6.0]), place, 0.8) for place in range(8)]
        accepted = 0
        for token in tokens:
            if rng.random() >= (0.9 if token[2] > 1.0 else 0.5):
                break
            accepted += 1
        predictor.observe(tokens, accepted)
    assert predictor.rate(features(0.8, 6.0, 1, 0.8)) == pytest.approx(0.9, abs=0.05)
    assert predictor.rate(features(0.8, 0.5, 1, 0.8)) == pytest.approx(0.5, abs=0.08)


def test_it_forgets():
    predictor = AcceptancePredictor(memory=200)
    token = features(0.9, 2.0, 0, 0.9)
    for outcome, expected in ((1, 0.97), (0, 0.1)):
        for _ in range(800):
            predictor.observe([token], outcome)
        rate = predictor.rate(token)
        assert rate > expected if outcome else rate < expected
    assert np.isfinite(predictor.weights).all()


def test_nothing_is_learned_behind_a_rejection():
    tokens = [features(0.9, 2.0, place, 0.9) for place in range(4)]
    short, long = AcceptancePredictor(), AcceptancePredictor()
    short.observe(tokens[:2], 1)
    long.observe(tokens, 1)
    assert np.array_equal(short.weights, long.weights)


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="memory"):
        AcceptancePredictor(memory=0.5)
    with pytest.raises(ValueError, match="prior_scale"):
        AcceptancePredictor(prior_scale=0.0)
    with pytest.raises(ValueError, match="accepted"):
        AcceptancePredictor().observe([], 1)


def test_auc_and_calibration():
    assert auc([0.1, 0.4, 0.35, 0.8], [False, False, True, True]) == 0.75
    assert auc([0.5, 0.5], [False, True]) == 0.5
    with pytest.raises(ValueError, match="both"):
        auc([0.5], [True])
    assert calibration_error([0.25] * 4, [True, False, False, False], bins=1) == 0.0
    assert calibration_error([0.5] * 4, [True] * 4, bins=2) == 0.5


def recorded(rng: np.random.Generator, rounds: int = 40, rows: int = 6, gamma: int = 8):
    gap = rng.exponential(2.0, (rounds, rows, gamma))
    kept = rng.random(gap.shape) < 1 - 0.5 * np.exp(-gap)
    accepted = kept.cumprod(axis=2).sum(axis=2)
    return {"accepted": accepted, "gap": gap, "token_prob": np.full(gap.shape, 0.8)}


def test_held_rows_are_judged_and_not_learned_from():
    runs = runs_of(recorded(np.random.default_rng(0)))
    told = {name: judge(runs, make, 0, {1, 3}) for name, make in PREDICTORS.items()}
    known = sum(min(run["accepted"] + 1, 8) for run in runs if run["row"] in (1, 3))
    assert {figures["tokens"] for figures in told.values()} == {known}
    assert told["regression"]["auc"] > told["token probability in bins"]["auc"] + 0.05


def test_every_run_is_predicted_before_it_is_learned():
    calls = []

    class Spy:
        def predict(self, run, rate):
            calls.append(("predict", id(run)))
            return [0.5] * len(run["token_prob"])

        def learn(self, run, rate):
            calls.append(("learn", id(run)))

    runs = runs_of(recorded(np.random.default_rng(1), rounds=4, rows=2))
    judge(runs, Spy, 1, set())
    first, *rest = runs
    expected = [("learn", id(first))]
    for run in rest:
        expected += [("predict", id(run)), ("learn", id(run))]
    assert calls == expected
