"""Acceptance estimators: rules, convergence, drift and bounds."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aspire_sglang.speculation.acceptance import (
    MAX_RATE,
    MIN_RATE,
    AcceptanceEstimator,
    BetaAcceptance,
    EmaAcceptance,
    EstimatorKind,
    make_estimator,
)

KINDS: list[EstimatorKind] = ["ema", "beta"]


def accepted_run(rng: random.Random, rate: float, proposed: int) -> int:
    accepted = 0
    while accepted < proposed and rng.random() < rate:
        accepted += 1
    return accepted


def mean_rate(estimator: AcceptanceEstimator, rate: float, proposed: int, verifies: int) -> float:
    """Average estimate over the second half of ``verifies`` synthetic verifies."""
    rng = random.Random(7)
    seen = []
    for step in range(verifies):
        estimator.observe(proposed, accepted_run(rng, rate, proposed))
        if step >= verifies // 2:
            seen.append(estimator.rate)
    return sum(seen) / len(seen)


def test_ema_follows_the_published_rule() -> None:
    estimator = EmaAcceptance()
    assert estimator.rate == pytest.approx(0.9)
    estimator.observe(5, 5)  # sample 5/5
    assert estimator.rate == pytest.approx(0.8 * 0.9 + 0.2 * 1.0)
    estimator.observe(5, 3)  # sample 3/4
    assert estimator.rate == pytest.approx(0.8 * 0.92 + 0.2 * 0.75)
    estimator.observe(4, 0)  # sample 0/1
    assert estimator.rate == pytest.approx(0.8 * 0.886)


def test_beta_counts_a_failure_only_when_a_draft_was_rejected() -> None:
    estimator = BetaAcceptance(prior_rate=0.5, prior_strength=2.0, discount=1.0)
    estimator.observe(4, 4)
    assert estimator.rate == pytest.approx((1 + 4) / (2 + 4))
    estimator.observe(4, 1)
    assert estimator.rate == pytest.approx((1 + 5) / (2 + 5 + 1))


@pytest.mark.parametrize("rate", [0.3, 0.6, 0.9])
@pytest.mark.parametrize("proposed", [1, 4, 12])
def test_beta_converges_to_the_true_rate_at_every_length(rate: float, proposed: int) -> None:
    estimator = BetaAcceptance(discount=0.99)
    assert mean_rate(estimator, rate, proposed, 4000) == pytest.approx(rate, abs=0.03)


@pytest.mark.parametrize(("proposed", "expected"), [(1, 0.900), (5, 0.797), (16, 0.752)])
def test_ema_reads_low_on_long_runs(proposed: int, expected: float) -> None:
    # Exact means of the sample at p = .9: sum over a<k of p^a (1-p) a/(a+1), plus p^k.
    assert mean_rate(EmaAcceptance(), 0.9, proposed, 4000) == pytest.approx(expected, abs=0.02)


@pytest.mark.parametrize("kind", KINDS)
def test_follows_a_change_of_rate(kind: EstimatorKind) -> None:
    estimator = make_estimator(kind)
    low = mean_rate(estimator, 0.2, 3, 200)
    high = mean_rate(estimator, 0.95, 3, 200)
    assert low < 0.35
    assert high > 0.85


@pytest.mark.parametrize("kind", KINDS)
def test_plain_steps_drift_back_to_the_prior(kind: EstimatorKind) -> None:
    estimator = make_estimator(kind)
    for _ in range(50):
        estimator.observe(4, 0)
    bottom = estimator.rate
    assert bottom < 0.2
    rates = []
    for _ in range(1000):
        estimator.decay()
        rates.append(estimator.rate)
    assert rates == sorted(rates)
    assert rates[10] < 0.5, "a few plain steps must not erase what was learned"
    assert rates[-1] == pytest.approx(0.9, abs=0.01)


def test_drift_also_lowers_an_estimate_above_the_prior() -> None:
    estimator = EmaAcceptance(start=0.5, drift=0.5)
    estimator.observe(2, 2)
    above = estimator.rate
    estimator.decay()
    assert estimator.rate == pytest.approx((above + 0.5) / 2)


verifies = st.lists(
    st.one_of(
        st.none(),
        st.integers(1, 16).flatmap(lambda k: st.tuples(st.just(k), st.integers(0, k))),
    ),
    max_size=60,
)


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None)
@given(events=verifies)
def test_rate_stays_in_bounds_and_is_deterministic(
    kind: EstimatorKind, events: list[tuple[int, int] | None]
) -> None:
    first, second = make_estimator(kind), make_estimator(kind)
    for event in events:
        for estimator in (first, second):
            if event is None:
                estimator.decay()
            else:
                estimator.observe(*event)
        assert MIN_RATE <= first.rate <= MAX_RATE
        assert first.rate == second.rate


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None)
@given(before=verifies, proposed=st.integers(2, 16))
def test_more_accepted_never_lowers_the_estimate(
    kind: EstimatorKind, before: list[tuple[int, int] | None], proposed: int
) -> None:
    rates = []
    for accepted in range(proposed + 1):
        estimator = make_estimator(kind)
        for event in before:
            if event is not None:
                estimator.observe(*event)
        estimator.observe(proposed, accepted)
        rates.append(estimator.rate)
    assert rates == sorted(rates)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("proposed", "accepted"), [(0, 0), (-1, 0), (3, 4), (3, -1)])
def test_impossible_verifies_are_refused(kind: EstimatorKind, proposed: int, accepted: int) -> None:
    estimator = make_estimator(kind)
    before = estimator.rate
    with pytest.raises(ValueError, match=r"accepted must be|at least one draft"):
        estimator.observe(proposed, accepted)
    assert estimator.rate == before


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("ema", {"old_weight": 1.0}),
        ("ema", {"start": 1.0}),
        ("ema", {"drift": -0.1}),
        ("beta", {"prior_rate": 0.0}),
        ("beta", {"prior_strength": 0.0}),
        ("beta", {"discount": 0.0}),
        ("beta", {"drift": 1.5}),
    ],
)
def test_bad_options_are_refused(kind: EstimatorKind, options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        make_estimator(kind, **options)


def test_unknown_estimator_names_the_valid_ones() -> None:
    with pytest.raises(ValueError, match="'mean'; valid names: ema, beta"):
        make_estimator("mean")  # type: ignore[arg-type]
