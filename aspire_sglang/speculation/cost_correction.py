"""Keeps a cost model true while the server runs, from the step times it measures."""

from __future__ import annotations

import math

import numpy as np
from scipy.linalg import solve_triangular
from scipy.optimize import nnls

from aspire_sglang.speculation.cost_model import Array, CostModel, StepShape, shape_features

# A term the base model calls free still gets this share of a first step as its unit of change, or
# no later measurement could ever give it a price.
_FREE_TERM_SHARE = 0.25
# Mean square share of one of four equal terms: what a step adds to the diagonal of `information`.
_TYPICAL_INFORMATION = 0.25
_LEAST_PREDICTION = 1e-3


class OnlineCostModel:
    """Recursive least squares, with forgetting, on the terms of a base cost model.

    The unknowns are four factors, one per term, all 1 at first; a measured step gives one equation
    in them, relative to the base model's prediction so that short and long steps count alike.
    Factors stay >= 0. Two guards make it fit for measurements in a live server:

    - Where recent steps cannot tell the terms apart (all of one shape), the factors are pulled to
      one common factor: "the machine became slower" is the simplest account.
    - A measurement counts at most as ``outlier_ratio`` times the current prediction (or its
      inverse), so a page fault or a foreign prefill hardly moves the model. Each further clamped
      step on the same side widens the limit by that ratio again: a lasting change gets through.

    State is a 4x4 matrix and a few numbers. The result depends on the calls alone: ranks that are
    given the same measurements hold the same model.

    Args:
        base: the model to correct; its buckets are kept.
        memory: effective number of recent steps, > 1.
        coupling: strength > 0 of the pull to a common factor, in steps; near the squared noise of
            a step time over the squared spread expected between factors.
        outlier_ratio: > 1.
        spread: >= 1, most that a term's factor may differ from the common one. A profile measured
            what the terms cost relative to each other; under noise, steps that are all alike (a
            batch that does not draft) would otherwise move everything to one term and never let
            the others come back. Infinite where the base was guessed.

    Raises:
        ValueError: an argument is outside its range.
    """

    def __init__(
        self,
        base: CostModel,
        memory: float = 50.0,
        coupling: float = 0.05,
        outlier_ratio: float = 1.25,
        spread: float = 3.0,
    ) -> None:
        if not memory > 1.0:
            raise ValueError(f"memory must be above 1 step, got {memory}")
        if not coupling > 0.0:
            raise ValueError(f"coupling must be positive, got {coupling}")
        if not outlier_ratio > 1.0:
            raise ValueError(f"outlier_ratio must be above 1, got {outlier_ratio}")
        if not spread >= 1.0:
            raise ValueError(f"spread must be at least 1, got {spread}")
        self._spread = spread
        self._base = base
        self._model = base
        self._gain = 1.0 / memory
        self._coupling = coupling
        self._log_limit = math.log(outlier_ratio)
        self._clamped_run = 0
        self._common = 1.0
        self._units: Array | None = None  # coefficient change that a factor of 1 stands for
        # The base model enters as if a full memory of steps had agreed with it.
        self._information: Array = np.eye(4) * memory * _TYPICAL_INFORMATION
        self._evidence: Array = np.zeros(4)

    @property
    def model(self) -> CostModel:
        """The corrected model (a new object after each ``correct``)."""
        return self._model

    def correct(self, shape: StepShape, seconds: float) -> None:
        """Learn from one measured step.

        Raises:
            ValueError: ``seconds`` is not positive and finite, or the base model calls the shape
                free, so that no relative error exists.
        """
        if not (math.isfinite(seconds) and seconds > 0.0):
            raise ValueError(f"a step time must be positive and finite, got {seconds}")
        expected = self._base.predict(shape)
        if not expected > 0.0:
            raise ValueError(f"the base cost model gives {shape} no cost")
        features = np.array(shape_features(shape, self._base.buckets))
        coefficients = np.array(self._base.coefficients)
        if self._units is None:
            floor = _FREE_TERM_SHARE * expected / np.maximum(features, 1.0)
            self._units = np.where(coefficients > 0.0, coefficients, floor)
            self._evidence = self._information @ (coefficients / self._units)

        # A corrected model may call a shape nearly free; the band needs some width around it.
        predicted = max(self._model.predict(shape), _LEAST_PREDICTION * expected)
        target = self._clamped(predicted, seconds) / expected
        row = features * self._units / expected
        keep = 1.0 - self._gain
        self._information = keep * self._information + np.outer(row, row)
        self._evidence = keep * self._evidence + row * target
        self._common += self._gain * (target - self._common)
        centre = self._common * coefficients / self._units
        factors = self._solve(centre)
        priced = centre > 0.0  # a term the base calls free has no relative price to keep to
        factors[priced] = np.clip(
            factors[priced], centre[priced] / self._spread, centre[priced] * self._spread
        )
        self._model = self._base.with_coefficients((factors * self._units).tolist())

    def _clamped(self, predicted: float, seconds: float) -> float:
        """``seconds`` moved into the band around ``predicted``; counts clamped steps in a row."""
        error = math.log(seconds / predicted)
        side = int(math.copysign(1, error))
        run = max(self._clamped_run * side, 0)
        limit = self._log_limit * (1 + run)
        self._clamped_run = side * (run + 1) if abs(error) > self._log_limit else 0
        return predicted * math.exp(side * min(abs(error), limit))

    def _solve(self, centre: Array) -> Array:
        """Factors >= 0 that fit the remembered steps best, pulled to ``centre``.

        Minimizes f'Mf - 2v'f over f >= 0, which is ||L'f - inv(L)v||^2 with M = LL'.
        """
        matrix = self._information + self._coupling * np.eye(4)
        vector = self._evidence + self._coupling * centre
        lower = np.linalg.cholesky(matrix)
        factors, _ = nnls(lower.T, solve_triangular(lower, vector, lower=True))
        return np.asarray(factors, dtype=np.float64)
