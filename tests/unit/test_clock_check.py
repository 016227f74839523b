"""Drafting that loses by the clock rests, ever longer, and is tried again."""

from __future__ import annotations

import pytest

from aspire_sglang.speculation.clock_check import (
    LONGEST_REST,
    WINDOW_SECONDS,
    WINDOW_STEPS,
    ClockCheck,
)
from aspire_sglang.speculation.rows import PLAIN_PHASE


def stretch(check: ClockCheck, gain: float) -> None:
    """Steps of eight requests that commit ``gain`` times what plain steps of 2 ms would."""
    for _ in range(10):
        seconds = WINDOW_SECONDS / 9.5
        check.observe(round(gain * 8 * seconds / 2e-3), seconds, WINDOW_STEPS // 9, 8, 2e-3)


def test_drafting_goes_on_where_it_wins_or_is_as_fast():
    check = ClockCheck()
    for gain in (1.5, 0.99, 1.01):
        stretch(check, gain)
        assert check.rest == 0


def test_a_short_stretch_says_nothing():
    check = ClockCheck()
    check.observe(1, 0.9 * WINDOW_SECONDS, WINDOW_STEPS, 8, 2e-3)
    assert check.rest == 0
    check.observe(1, 0.2 * WINDOW_SECONDS, 1, 8, 2e-3)
    assert check.rest == PLAIN_PHASE
    check = ClockCheck()
    check.observe(1, 9 * WINDOW_SECONDS, WINDOW_STEPS - 1, 8, 2e-3)
    assert check.rest == 0


def test_rests_become_longer_until_drafting_wins():
    check, rests = ClockCheck(), []
    for _ in range(8):
        stretch(check, 0.8)
        rests.append(check.rest)
        check.plain_ran(check.rest - 1)
        assert check.rest == 1
        check.plain_ran(5)
        assert check.rest == 0
    assert rests[:3] == [PLAIN_PHASE, 2 * PLAIN_PHASE, 4 * PLAIN_PHASE]
    assert rests[-1] == LONGEST_REST
    stretch(check, 1.2)
    stretch(check, 0.8)
    assert check.rest == PLAIN_PHASE


@pytest.mark.parametrize("times", [(0.0, 1.0), (1.0, 0.0)])
def test_refuses_nonsense(times):
    with pytest.raises(ValueError, match="positive"):
        ClockCheck().observe(1, times[0], 1, 1, times[1])
