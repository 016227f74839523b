"""The step-cost model of the running server: fitted at start-up, corrected by every step."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence

from aspire_sglang.speculation.cost_correction import OnlineCostModel
from aspire_sglang.speculation.cost_model import CostModel, StepShape
from aspire_sglang.speculation.plain_speed import PlainSpeed

logger = logging.getLogger(__name__)

# Where no profile was taken: a step whose time is mostly KV reads. Only ratios matter to the
# scheduler, and measured steps replace these figures soon.
_UNMEASURED = CostModel(fixed=1e-2, per_token=1e-4, per_kv=1e-6)


# A profile that its own fit misses by more than this, in the median, was taken while something
# else used the machine. On a quiet one the error is a few percent.
_WORST_MEDIAN_ERROR = 0.25
_PROFILE_TRIES = 3


# Multiples of it, modulo 1, never fall in step with a schedule of any period.
_GOLDEN = (5.0**0.5 - 1.0) / 2.0


class RunningCost:
    """Predicts the time of a step and learns from the measured ones."""

    @classmethod
    def profiled(cls, measure: Callable[[], Sequence[tuple[StepShape, float]]]) -> RunningCost:
        """Fit to what ``measure`` returns, and measure again where the fit makes no sense of it.

        A disturbed profile is worse than none: a scheduler that believes it may decode plainly
        for long where drafts pay. After a few tries the model starts from a guess instead.
        """
        for _ in range(_PROFILE_TRIES):
            samples = measure()
            if not samples:
                return cls()
            cost = cls(samples)
            assert cost._quality is not None
            if cost._quality.median <= _WORST_MEDIAN_ERROR:
                return cost
            logger.warning(
                "ASPIRE: the step-cost profile was disturbed (median error %.0f %%)",
                100 * cost._quality.median,
            )
        logger.warning("ASPIRE: no quiet moment for a profile; step costs are learnt while serving")
        return cls()

    @classmethod
    def stored(cls, model: CostModel, source: str) -> RunningCost:
        """Start from an earlier fit of the same setting, read from ``source``."""
        return cls(fitted=model, source=f"read from {source}")

    def __init__(
        self,
        samples: Sequence[tuple[StepShape, float]] = (),
        fitted: CostModel | None = None,
        source: str = "profiled here",
    ) -> None:
        self.fitted = CostModel.fit(samples) if samples else fitted
        """What the start-up profile gave; None without one."""
        self._source = source if self.fitted is not None else "not profiled"
        base = self.fitted or _UNMEASURED
        self._quality = base.quality
        self._online = OnlineCostModel(base, spread=3.0 if self.fitted else math.inf)
        self.plain_speed = PlainSpeed()
        self._steps = 0
        self._seen = 0.0
        self._error_sum = 0.0

    @property
    def model(self) -> CostModel:
        return self._online.model

    def observe(
        self,
        shape: StepShape,
        seconds: float,
        share: float = 1.0,
        agree: Callable[[float], float] = float,
    ) -> None:
        """Correct the model by a measured step.

        Args:
            share: of the steps that are used at all, spread evenly over every period that steps
                may have; for steps so short that learning from each costs too much.
            agree: asked for the seconds of every step that is used. Tensor-parallel ranks must
                learn the same, and each measures for itself.
        """
        self._seen = (self._seen + _GOLDEN) % 1.0
        if self._seen >= share:
            return
        seconds = agree(seconds)
        self._steps += 1
        self._error_sum += abs(self.model.predict(shape) / seconds - 1.0)
        self._online.correct(shape, seconds)

    def report(self) -> dict[str, float]:
        """Coefficients in microseconds per unit, and how well they predict."""
        names = ("fixed_us", "per_token_us", "per_kv_us", "per_pair_us")
        report = {
            name: value * 1e6 for name, value in zip(names, self.model.coefficients, strict=True)
        }
        if self._quality is not None:
            report["profile_median_error"] = self._quality.median
            report["profile_worst_error"] = self._quality.worst
        if self._steps:
            report["mean_relative_error"] = self._error_sum / self._steps
        return report

    def describe(self) -> str:
        """One line for the start-up log."""
        return f"{self._source}: " + ", ".join(f"{k}={v:.4g}" for k, v in self.report().items())
