"""How likely a draft token is to be accepted, learned online from several things known of it.

Logistic regression whose weights are learned by the extended Kalman filter: one exact second-order
update per token, no step size to tune, a few microseconds for a handful of features. Deterministic:
ranks that see the same verifies agree. :class:`~aspire_sglang.speculation.confidence.
ConfidenceCalibration` knows the token's probability only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_SURE = 12.0
FEATURES = ("constant", "doubt", "gap", "position", "rate")


def features(probability: float, gap: float, position: int, rate: float) -> NDArray[np.float64]:
    """What is known of a draft token when it has been drawn, on comparable scales.

    Args:
        probability: the draft's probability of its token.
        gap: difference of the two highest log-probabilities of the draft.
        position: drafts of the run before it.
        rate: recent acceptance rate of its request, in (0, 1).
    """
    doubt = -math.log2(max(1.0 - probability, 2.0**-_SURE))
    odds = math.log(rate / (1.0 - rate))
    return np.array([1.0, doubt / 4.0, min(gap, 8.0) / 4.0, position / 8.0, odds / 2.0])


class AcceptancePredictor:
    """Online logistic regression of acceptance, old evidence discounted.

    Args:
        memory: effective number of recent tokens, >= 1.
        prior_scale: standard deviation of the weights before any evidence, > 0.

    Raises:
        ValueError: an argument is outside its range.
    """

    def __init__(self, memory: float = 5000.0, prior_scale: float = 1.0) -> None:
        if not memory >= 1.0:
            raise ValueError(f"memory must be at least 1 token, got {memory}")
        if not prior_scale > 0.0:
            raise ValueError(f"prior_scale must be positive, got {prior_scale}")
        size = len(FEATURES)
        self._keep = 1.0 - 1.0 / memory
        self._prior = prior_scale**2
        # Before any evidence: the request's own rate.
        self.weights = np.zeros(size)
        self.weights[FEATURES.index("rate")] = 2.0
        self._covariance = self._prior * np.eye(size)

    def token(
        self, probability: float, gap: float, position: int, rate: float
    ) -> NDArray[np.float64]:
        """See :func:`features`."""
        return features(probability, gap, position, rate)

    def survival(self, tokens: Sequence[NDArray[np.float64]], expected: float) -> float:
        """Probability that a whole pending run is accepted; ``expected`` is in the features."""
        return math.prod(map(self.rate, tokens))

    def rate(self, token: NDArray[np.float64]) -> float:
        """Probability that the token is accepted, given that its run was so far."""
        return 1.0 / (1.0 + math.exp(-float(self.weights @ token)))

    def observe(self, tokens: Sequence[NDArray[np.float64]], accepted: int) -> None:
        """Learn from one verify.

        Args:
            tokens: features of every token of the run, in order.
            accepted: how many of them were accepted; the next one, if any, was rejected, and
                nothing is known of the rest.

        Raises:
            ValueError: unless ``0 <= accepted <= len(tokens)``.
        """
        if not 0 <= accepted <= len(tokens):
            raise ValueError(f"accepted must be in 0..{len(tokens)}, got {accepted}")
        for place, token in enumerate(tokens[: accepted + 1]):
            expected = self.rate(token)
            spread = self._covariance @ token
            curvature = expected * (1.0 - expected)
            gain = spread / (1.0 + curvature * float(token @ spread))
            self.weights = self.weights + gain * ((place < accepted) - expected)
            shrunk = self._covariance - curvature * np.outer(gain, spread)
            # Forgetting lets uncertainty grow back, though never beyond that of the start.
            self._covariance = shrunk / self._keep
            largest = float(np.trace(self._covariance)) / len(token)
            if largest > self._prior:
                self._covariance *= self._prior / largest
