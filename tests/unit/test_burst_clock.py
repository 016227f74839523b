"""What drafting commits by the clock: of bursts whose results come one round late."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang.srt.speculative.base_spec_worker")

from aspire_sglang.runtime import gpu_burst
from aspire_sglang.runtime.gpu_burst import BurstClock
from aspire_sglang.runtime.modes import Running
from aspire_sglang.speculation.cost_model import CostModel
from aspire_sglang.speculation.plain_speed import PlainSpeed

ROWS, STEPS, STEP, PLAIN, PREFILL = 64, 4, 2.2e-3, 4.4e-3, 15e-3


class Recorder:
    """Takes the place of the ``ClockCheck``."""

    def __init__(self) -> None:
        self.rest = 0
        self.tokens = self.plain_tokens = self.seconds = 0.0

    def observe(
        self, tokens: int, seconds: float, steps: int, rows: int, plain_seconds: float
    ) -> None:
        self.tokens += tokens
        self.seconds += seconds
        self.plain_tokens += rows * seconds / plain_seconds


def clock_of(check: Recorder, most_queries: int) -> BurstClock:
    """The clock of a worker whose plain steps take ``PLAIN`` seconds."""
    return BurstClock(
        SimpleNamespace(
            modes=SimpleNamespace(clock_check=check),
            cost=SimpleNamespace(model=CostModel(PLAIN, 0.0, 0.0), plain_speed=PlainSpeed()),
            ranks=SimpleNamespace(first_number=float),
            may_decode_plainly=lambda rows: True,
            speculative_num_draft_tokens=most_queries,
        )
    )


def served(monkeypatch: Any, prefill_every: int, gain: float, rounds: int = 200) -> Recorder:
    """A server whose device is always busy: bursts that commit ``gain`` times what plain steps
    would, and now and then a prefill between them."""
    now = [0.0]
    monkeypatch.setattr(gpu_burst, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    check = Recorder()
    clock = clock_of(check, most_queries=17)
    running = Running(list(range(ROWS)), [100] * ROWS, [], [])
    tokens = round(gain * ROWS * STEP * STEPS / PLAIN)
    free, waiting = 0.0, []
    for number in itertools.count():
        if number == rounds:
            return check
        if prefill_every and number % prefill_every == 0:
            clock.interrupt(plain=False)
            free += PREFILL
            waiting.append((free, None))
        burst = clock.begin(running)
        for _ in range(STEPS):
            clock.launched(burst, STEP)
        free += STEPS * STEP
        waiting.append((free, burst))
        # The result before is processed while this burst runs.
        while len(waiting) > 1:
            done, before = waiting.pop(0)
            now[0] = max(now[0], done)
            if before is not None:
                for step in range(STEPS):
                    clock.reported(before, tokens if step == 0 else 0)
    raise AssertionError


@pytest.mark.parametrize("prefill_every", [0, 10, 3, 2])
@pytest.mark.parametrize("gain", [1.5, 0.8])
def test_prefills_in_between_change_nothing(monkeypatch, prefill_every, gain):
    check = served(monkeypatch, prefill_every, gain)
    assert check.seconds > 0.3
    assert check.tokens / check.plain_tokens == pytest.approx(gain, rel=0.01)


def test_nothing_is_known_where_every_burst_follows_a_prefill(monkeypatch):
    assert served(monkeypatch, 1, 1.5).seconds == 0.0


def test_a_stall_is_not_the_time_of_a_burst(monkeypatch):
    now = itertools.count(0.0, 5.0)
    monkeypatch.setattr(gpu_burst, "time", SimpleNamespace(perf_counter=lambda: next(now)))
    check = Recorder()
    clock = clock_of(check, most_queries=1)
    for _ in range(5):
        burst = clock.begin(Running([1], [100], [], []))
        for _ in range(STEPS):
            clock.launched(burst, STEP)
        for _ in range(STEPS):
            clock.reported(burst, 1)
    assert check.seconds == 0.0


def test_the_first_runs_behind_plain_steps_do_not_count(monkeypatch):
    check = served(monkeypatch, 0, 1.5, rounds=9)
    # 34 steps, nine bursts, whose drafts began together.
    assert check.seconds == 0.0
