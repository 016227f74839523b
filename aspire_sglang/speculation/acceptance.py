"""Per-request estimates of the probability that the next draft token is accepted.

A verify of ``k`` drafts stops at the first rejection, so it reveals ``a`` successes and, only when
``a < k``, one failure: a geometric variable censored at ``k``. Both estimators here turn that into
one number in (0, 1). They are deterministic, so ranks that see the same verifies agree.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol, get_args

# Bounds of every reported rate. At 1 the expected run has no finite limit, and at 0 a rate could
# only be left by a success that a policy would never try for.
MIN_RATE = 0.01
MAX_RATE = 0.995

EstimatorKind = Literal["ema", "beta"]


class AcceptanceEstimator(Protocol):
    """Running estimate of one request's draft acceptance."""

    @property
    def rate(self) -> float:
        """Probability, in [MIN_RATE, MAX_RATE], that the next draft token is accepted."""
        ...

    def observe(self, proposed: int, accepted: int) -> None:
        """Learn from one verify of ``proposed`` >= 1 drafts, the first ``accepted`` of them kept.

        Raises:
            ValueError: unless ``proposed >= 1`` and ``0 <= accepted <= proposed``.
        """
        ...

    def decay(self, steps: int = 1) -> None:
        """Note plain steps (verifies of zero drafts), which say nothing about acceptance.

        The estimate drifts towards the prior, so a request that stopped drafting tries again.
        """
        ...


@dataclass(slots=True)
class EmaAcceptance:
    """The ASPIRE paper's rule: exponential average of ``accepted / min(accepted + 1, proposed)``.

    The sample is 1 after a fully accepted run and a/(a+1) otherwise. For constant acceptance p and
    run length k its mean is p only at k = 1. Longer runs read low (p = .9: .80 at k = 5 and .75 at
    k = 16), which shortens the drafts that a length rule picks; ``BetaAcceptance`` has no such
    bias.

    Args:
        old_weight: weight in [0, 1) of the previous estimate at each verify (paper: 0.8).
        start: estimate of a new request, in (0, 1) (paper: 0.9).
        drift: share in [0, 1] of the distance to ``start`` that one plain step restores (ours).

    Raises:
        ValueError: an argument is outside its range.
    """

    old_weight: float = 0.8
    start: float = 0.9
    drift: float = 0.01
    _mean: float = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not 0.0 <= self.old_weight < 1.0:
            raise ValueError(f"old_weight must be in [0, 1), got {self.old_weight}")
        _check_prior(self.start, "start")
        _check_drift(self.drift)
        self._mean = self.start

    @property
    def rate(self) -> float:
        """Probability, in [MIN_RATE, MAX_RATE], that the next draft token is accepted."""
        return _clamp(self._mean)

    def observe(self, proposed: int, accepted: int) -> None:
        """Learn from one verify; see ``AcceptanceEstimator.observe``."""
        _check_verify(proposed, accepted)
        sample = accepted / min(accepted + 1, proposed)
        self._mean = self.old_weight * self._mean + (1.0 - self.old_weight) * sample

    def decay(self, steps: int = 1) -> None:
        """Drift towards ``start`` after plain steps."""
        self._mean += (1.0 - (1.0 - self.drift) ** steps) * (self.start - self._mean)


@dataclass(slots=True)
class BetaAcceptance:
    """Mean of a Beta posterior over censored geometric observations, old ones discounted.

    A verify adds ``accepted`` successes and one failure if a draft was rejected. Successes and
    failures keep the likelihood of the censored run, so the estimate is not biased by the draft
    length, unlike the paper's average. The prior is never discounted: without news, the estimate
    returns to it.

    Args:
        prior_rate: estimate of a new request, in (0, 1).
        prior_strength: weight of the prior, in draft tokens, > 0.
        discount: factor in (0, 1] on old evidence at each verify; the memory is about
            ``1 / (1 - discount)`` verifies.
        drift: share in [0, 1] of the evidence that one plain step forgets.

    Raises:
        ValueError: an argument is outside its range.
    """

    prior_rate: float = 0.9
    prior_strength: float = 2.0
    discount: float = 0.95
    drift: float = 0.01
    _successes: float = field(init=False, repr=False, default=0.0)
    _failures: float = field(init=False, repr=False, default=0.0)

    def __post_init__(self) -> None:
        _check_prior(self.prior_rate, "prior_rate")
        if not self.prior_strength > 0.0:
            raise ValueError(f"prior_strength must be positive, got {self.prior_strength}")
        if not 0.0 < self.discount <= 1.0:
            raise ValueError(f"discount must be in (0, 1], got {self.discount}")
        _check_drift(self.drift)

    @property
    def rate(self) -> float:
        """Probability, in [MIN_RATE, MAX_RATE], that the next draft token is accepted."""
        successes = self.prior_rate * self.prior_strength + self._successes
        return _clamp(successes / (self.prior_strength + self._successes + self._failures))

    def observe(self, proposed: int, accepted: int) -> None:
        """Learn from one verify; see ``AcceptanceEstimator.observe``."""
        _check_verify(proposed, accepted)
        self._successes = self.discount * self._successes + accepted
        self._failures = self.discount * self._failures + (accepted < proposed)

    def decay(self, steps: int = 1) -> None:
        """Forget a little evidence after plain steps, which drifts the rate to ``prior_rate``."""
        kept = (1.0 - self.drift) ** steps
        self._successes *= kept
        self._failures *= kept


def make_estimator(kind: EstimatorKind, **options: float) -> AcceptanceEstimator:
    """Build the estimator named ``kind`` with its keyword ``options``.

    Raises:
        ValueError: ``kind`` is unknown, or an option is outside its range.
        TypeError: the estimator has no such option.
    """
    if kind == "ema":
        return EmaAcceptance(**options)
    if kind == "beta":
        return BetaAcceptance(**options)
    names = ", ".join(get_args(EstimatorKind))
    raise ValueError(f"unknown acceptance estimator {kind!r}; valid names: {names}")


def _clamp(rate: float) -> float:
    return min(max(rate, MIN_RATE), MAX_RATE)


def _check_verify(proposed: int, accepted: int) -> None:
    if proposed < 1:
        raise ValueError(f"a verify must have at least one draft, got {proposed}; use decay()")
    if not 0 <= accepted <= proposed:
        raise ValueError(f"accepted must be in 0..{proposed}, got {accepted}")


def _check_prior(rate: float, name: str) -> None:
    if not 0.0 < rate < 1.0:
        raise ValueError(f"{name} must be in (0, 1), got {rate}")


def _check_drift(drift: float) -> None:
    if not 0.0 <= drift <= 1.0:
        raise ValueError(f"drift must be in [0, 1], got {drift}")
