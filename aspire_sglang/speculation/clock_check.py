"""Whether drafting keeps up with plain decoding by the clock, not by the cost model.

The cost model knows what a step takes the device. Where the host's own work takes longer, as with
small models and many requests on a slow host, drafting can lose although every length was chosen
well. What was committed per second of the clock is compared with what plain steps would have
committed in the same time; where that was more, nobody drafts for a while, and each time that
drafting loses again the while is twice as long.
"""

from __future__ import annotations

from aspire_sglang.speculation.rows import PLAIN_PHASE

WINDOW_SECONDS = 0.25
"""Time over which both are compared, at least."""

WINDOW_STEPS = 160
"""Steps over which both are compared, at least: ten runs of sixteen drafts, as requests that draft
in step commit nothing for the whole of a run."""

WORTH_IT = 0.97
"""Drafting may be this much slower: noise must not stop it where both are equally fast."""

LONGEST_REST = 32 * PLAIN_PHASE
"""Most plain steps after which drafting is tried again."""


class ClockCheck:
    """Compares stretches of steps that drafted with plain steps of the same requests.

    Attributes:
        rest: plain steps that are still to be run before anybody may draft.
    """

    def __init__(self) -> None:
        self.rest = 0
        self._next_rest = PLAIN_PHASE
        self._steps = 0
        self._seconds = self._tokens = self._plain_tokens = 0.0

    def observe(
        self, tokens: int, seconds: float, steps: int, rows: int, plain_seconds: float
    ) -> None:
        """A stretch of steps in which somebody drafted, with nothing else in between.

        Args:
            tokens: committed by them.
            seconds: that they took by the clock.
            steps: how many.
            rows: requests of the batch.
            plain_seconds: what a plain step of these requests takes.

        Raises:
            ValueError: a time is not positive.
        """
        if not (seconds > 0.0 and plain_seconds > 0.0):
            raise ValueError(f"times must be positive: {seconds}, {plain_seconds}")
        self._steps += steps
        self._seconds += seconds
        self._tokens += tokens
        self._plain_tokens += rows * seconds / plain_seconds
        if self._seconds < WINDOW_SECONDS or self._steps < WINDOW_STEPS:
            return
        if self._tokens < WORTH_IT * self._plain_tokens:
            self.rest = self._next_rest
            self._next_rest = min(2 * self._next_rest, LONGEST_REST)
        else:
            self._next_rest = PLAIN_PHASE
        self._steps = 0
        self._seconds = self._tokens = self._plain_tokens = 0.0

    def plain_ran(self, steps: int) -> None:
        """The whole batch decoded plainly for so many steps."""
        self.rest = max(self.rest - steps, 0)
