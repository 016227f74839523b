"""What a step takes in which nobody drafts, where such steps run in a way of their own.

A cost model is fitted to steps that may hold drafts. Plain steps of the same rows can be faster,
above all small ones, in which the host takes longer than the device; by how much depends on the
number of rows and on the time of the step, and is learnt where it occurs.
"""

from __future__ import annotations

import math

UNKNOWN_RATIO = 0.6
"""What a plain step may take of a mixed one's time at best, before it was measured."""

_LEAST_RATIO = 0.3
_NEW_WEIGHT = 0.5


class PlainSpeed:
    """Measured time of plain steps over the time that the cost model predicts for them.

    The ratio is kept per power of two of rows, and per half power of two of predicted time.
    """

    def __init__(self) -> None:
        self._ratios: dict[tuple[int, int], float] = {}

    def ratio(self, rows: int, predicted: float) -> float | None:
        """The ratio of a step of so many rows and predicted seconds; None if never measured.

        At most 1: a mixed step without drafts is always an alternative.
        """
        ratio = self._ratios.get(_key(rows, predicted))
        return None if ratio is None else min(ratio, 1.0)

    def seconds(self, rows: int, predicted: float) -> float:
        """What such a step takes by the clock; as predicted, if never measured."""
        return predicted * self._ratios.get(_key(rows, predicted), 1.0)

    def observe(self, rows: int, predicted: float, seconds: float) -> None:
        """Learn from plain steps that took ``seconds`` each.

        Raises:
            ValueError: a number is not positive.
        """
        if not (rows > 0 and predicted > 0.0 and seconds > 0.0):
            raise ValueError(f"rows and times must be positive: {rows}, {predicted}, {seconds}")
        key = _key(rows, predicted)
        ratio = max(seconds / predicted, _LEAST_RATIO)
        before = self._ratios.get(key, ratio)
        self._ratios[key] = before + _NEW_WEIGHT * (ratio - before)

    def report(self) -> dict[str, float]:
        """Every measured ratio, by rows and predicted time."""
        return {
            f"{2**rows} rows, {2 ** (time / 2) * 1e3:.2g} ms": ratio
            for (rows, time), ratio in sorted(self._ratios.items())
        }


def _key(rows: int, predicted: float) -> tuple[int, int]:
    return round(math.log2(rows)), round(2 * math.log2(predicted))
