"""How likely a draft token is to be accepted, judged by the draft's own probability for it.

A token that the draft was sure of is accepted far more often than one it hesitated over, and a
run that holds a doubtful token is better verified than extended. The draft's probability is not
itself the acceptance rate, so it is calibrated online: tokens are sorted into bins by probability,
and every verify adds what it revealed to the bins of its tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

_FINEST = 1e-6


class RunJudge(Protocol):
    """Learns from verifies how likely a pending run is to be accepted."""

    def token(self, probability: float, gap: float, position: int, rate: float) -> Any:
        """What to keep of a draft token that has just been drawn.

        Args:
            probability: the draft's probability of it.
            gap: difference of the two highest log-probabilities of the draft.
            position: drafts of the run before it.
            rate: recent acceptance rate of its request, in (0, 1).
        """
        ...

    def survival(self, tokens: Sequence[Any], expected: float) -> float:
        """Probability that a whole pending run is accepted; 1 for an empty run.

        Args:
            tokens: what was kept of its tokens, in order.
            expected: recent acceptance rate of the request.
        """
        ...

    def observe(self, tokens: Sequence[Any], accepted: int) -> None:
        """Learn from one verify, of which the first ``accepted`` tokens were accepted.

        Raises:
            ValueError: unless ``0 <= accepted <= len(tokens)``.
        """
        ...


class ConfidenceCalibration:
    """Acceptance rates by bins of draft probability, old evidence discounted.

    Bins divide ``-log2(1 - p)`` evenly, so that .5, .75, .875, ... are their bounds: nearly all
    tokens have a high probability, and there the differences matter. Deterministic: ranks that see
    the same verifies agree.

    Args:
        bins: number of bins, >= 1; the last is open.
        memory: effective number of recent tokens per bin, >= 1.
        prior_strength: weight, in tokens, of the rate that the caller expects anyway, > 0.

    Raises:
        ValueError: an argument is outside its range.
    """

    def __init__(self, bins: int = 12, memory: float = 500.0, prior_strength: float = 4.0) -> None:
        if bins < 1:
            raise ValueError(f"bins must be at least 1, got {bins}")
        if not memory >= 1.0:
            raise ValueError(f"memory must be at least 1 token, got {memory}")
        if not prior_strength > 0.0:
            raise ValueError(f"prior_strength must be positive, got {prior_strength}")
        self._keep = 1.0 - 1.0 / memory
        self._strength = prior_strength
        self._accepted = [0.0] * bins
        self._seen = [0.0] * bins

    def token(self, probability: float, gap: float, position: int, rate: float) -> float:
        """What to keep of a draft token; see :class:`RunJudge`. Only its probability matters."""
        return probability

    def rate(self, probability: float, expected: float) -> float:
        """Probability that a draft of this probability is accepted, given that its run was so far.

        Args:
            probability: the draft's probability for its token, in [0, 1].
            expected: the rate to assume without evidence, as of the request's recent drafts.
        """
        index = self._bin(probability)
        accepted = self._accepted[index] + self._strength * expected
        return accepted / (self._seen[index] + self._strength)

    def observe(self, probabilities: Sequence[float], accepted: int) -> None:
        """Learn from one verify.

        Args:
            probabilities: the draft's probability of each token of the run, in order.
            accepted: how many of them were accepted; the next one, if any, was rejected, and
                nothing is known of the rest.

        Raises:
            ValueError: unless ``0 <= accepted <= len(probabilities)``.
        """
        if not 0 <= accepted <= len(probabilities):
            raise ValueError(f"accepted must be in 0..{len(probabilities)}, got {accepted}")
        for place, probability in enumerate(probabilities[: accepted + 1]):
            index = self._bin(probability)
            self._accepted[index] = self._keep * self._accepted[index] + (place < accepted)
            self._seen[index] = self._keep * self._seen[index] + 1.0

    def survival(self, probabilities: Sequence[float], expected: float) -> float:
        """Probability that a whole pending run is accepted; 1 for an empty run."""
        return math.prod(self.rate(probability, expected) for probability in probabilities)

    def _bin(self, probability: float) -> int:
        doubt = min(max(1.0 - probability, _FINEST), 1.0)
        return min(int(-math.log2(doubt)), len(self._seen) - 1)
