"""How long one mixed forward takes, as a linear function of what it reads and computes."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

Array = NDArray[np.float64]

_HUBER_ROUNDS = 5
_HUBER_WIDTH = 2.5
_EXACT_FIT = 1e-9


@dataclass(frozen=True, slots=True)
class StepShape:
    """What one forward of the target model has to do, summed over its rows.

    Attributes:
        tokens: query tokens in the forward.
        kv_tokens: tokens whose KV is read, summed over rows: the memory term of attention.
        score_pairs: query tokens times KV tokens, summed over rows: the compute term of attention.
            It matters where attention of a verify row is compute-bound, above all on CPUs.
    """

    tokens: int = 0
    kv_tokens: int = 0
    score_pairs: int = 0

    def row(self, query_len: int, kv_len: int) -> StepShape:
        """This shape plus one row of ``query_len`` query tokens over ``kv_len`` KV tokens.

        Raises:
            ValueError: ``query_len < 1`` or ``kv_len < 0``.
        """
        if query_len < 1 or kv_len < 0:
            raise ValueError(
                f"a row needs query_len >= 1 and kv_len >= 0, got {query_len}, {kv_len}"
            )
        return StepShape(
            self.tokens + query_len,
            self.kv_tokens + kv_len,
            self.score_pairs + query_len * kv_len,
        )


@dataclass(frozen=True, slots=True)
class FitQuality:
    """Relative errors |predicted - measured| / measured of a fit on its own samples."""

    median: float
    worst: float
    samples: int


@dataclass(frozen=True, slots=True)
class CostModel:
    """Predicts seconds per step.

    ``fixed + per_token * bucket(tokens) + per_kv * kv_tokens + per_pair * score_pairs``
    The paper's cost model (section on the scheduler) with a compute term for attention, and with
    tokens padded as a CUDA graph pads them, because step time is a staircase in tokens there.

    Attributes:
        fixed: seconds per step, whatever is in it.
        per_token: seconds per padded query token.
        per_kv: seconds per KV token read.
        per_pair: seconds per query-key pair.
        buckets: ascending token counts that a forward is padded to. Above the last one, and
            without buckets, a forward is not padded.
        quality: how well the fit describes its samples; None for a model that was not fitted.

    Raises:
        ValueError: a coefficient is negative or not finite, all are zero, or the buckets do not
            ascend from at least 1.
    """

    fixed: float
    per_token: float
    per_kv: float
    per_pair: float = 0.0
    buckets: tuple[int, ...] = ()
    quality: FitQuality | None = None

    def __post_init__(self) -> None:
        if any(not math.isfinite(c) or c < 0.0 for c in self.coefficients):
            raise ValueError(f"cost coefficients must be finite and >= 0, got {self.coefficients}")
        if not any(self.coefficients):
            raise ValueError("at least one cost coefficient must be positive")
        check_buckets(self.buckets)

    @property
    def coefficients(self) -> tuple[float, float, float, float]:
        """(fixed, per_token, per_kv, per_pair), in seconds per unit."""
        return (self.fixed, self.per_token, self.per_kv, self.per_pair)

    def with_coefficients(self, coefficients: Sequence[float]) -> CostModel:
        """The same buckets with other (fixed, per_token, per_kv, per_pair), and no fit quality.

        For ranks that receive the coefficients from the one that measures.

        Raises:
            ValueError: not four valid coefficients.
        """
        fixed, per_token, per_kv, per_pair = coefficients
        return replace(
            self, fixed=fixed, per_token=per_token, per_kv=per_kv, per_pair=per_pair, quality=None
        )

    def predict(self, shape: StepShape) -> float:
        """Predicted seconds of one step."""
        fixed, per_token, per_kv, per_pair = self.coefficients
        padded = pad_tokens(shape.tokens, self.buckets)
        return fixed + per_token * padded + per_kv * shape.kv_tokens + per_pair * shape.score_pairs

    def predict_many(self, tokens: Array, kv_tokens: Array, score_pairs: Array) -> Array:
        """Predicted seconds of many steps; the arguments broadcast against each other."""
        if self.buckets:
            tiers = np.asarray(self.buckets, dtype=np.float64)
            above = np.searchsorted(tiers, tokens)
            last = len(tiers) - 1
            tokens = np.where(above > last, tokens, tiers[np.minimum(above, last)])
        return (
            self.fixed
            + self.per_token * tokens
            + self.per_kv * kv_tokens
            + self.per_pair * score_pairs
        )

    @classmethod
    def fit(
        cls, samples: Sequence[tuple[StepShape, float]], buckets: Sequence[int] = ()
    ) -> CostModel:
        """Fit the coefficients to measured (shape, seconds) pairs.

        Non-negative least squares on relative errors, so a short step counts as much as a long
        one, reweighted (Huber) so that a few disturbed measurements do not bend the fit. Terms that
        the samples cannot tell apart (say, all rows with one query token: KV tokens equal pairs)
        are split arbitrarily, which is harmless on shapes like the samples and nowhere else.

        Raises:
            ValueError: fewer than four distinct shapes after padding, a time that is not positive
                and finite, or invalid buckets.
        """
        tiers = tuple(buckets)
        check_buckets(tiers)
        features = np.array([shape_features(shape, tiers) for shape, _ in samples])
        seconds = np.array([time for _, time in samples], dtype=np.float64)
        if not np.all(np.isfinite(seconds) & (seconds > 0.0)):
            raise ValueError("every measured step time must be positive and finite")
        distinct = len({tuple(row) for row in features.tolist()})
        if distinct < 4:
            raise ValueError(
                f"a cost fit needs at least 4 distinct step shapes, got {distinct} "
                f"in {len(samples)} samples"
            )

        relative = features / seconds[:, None]
        # Counts of KV tokens and of steps differ by 1e6 and more: without equal column norms the
        # solver's tolerance would treat the small columns as noise.
        norms = np.linalg.norm(relative, axis=0)
        norms[norms == 0.0] = 1.0
        columns = relative / norms
        weights = np.ones(len(seconds))
        for _ in range(_HUBER_ROUNDS):
            solution, _ = nnls(columns * weights[:, None], weights)
            errors = np.abs(columns @ solution - 1.0)
            width = max(_HUBER_WIDTH * float(np.median(errors)), _EXACT_FIT)
            weights = np.sqrt(width / np.maximum(errors, width))
        quality = FitQuality(float(np.median(errors)), float(errors.max()), len(seconds))
        fixed, per_token, per_kv, per_pair = (solution / norms).tolist()
        return cls(fixed, per_token, per_kv, per_pair, tiers, quality)


def pad_tokens(tokens: int, buckets: Sequence[int]) -> int:
    """The smallest bucket that holds ``tokens``; ``tokens`` itself when none does."""
    index = bisect_left(buckets, tokens)
    return buckets[index] if index < len(buckets) else tokens


def shape_features(shape: StepShape, buckets: Sequence[int]) -> tuple[float, float, float, float]:
    """What the four coefficients multiply: (1, padded tokens, KV tokens, pairs)."""
    padded = pad_tokens(shape.tokens, buckets)
    return (1.0, float(padded), float(shape.kv_tokens), float(shape.score_pairs))


def check_buckets(buckets: Sequence[int]) -> None:
    """Raise ValueError unless ``buckets`` ascend strictly from at least 1."""
    if any(low >= high for low, high in pairwise((0, *buckets))):
        raise ValueError(f"buckets must ascend strictly from at least 1, got {tuple(buckets)}")
