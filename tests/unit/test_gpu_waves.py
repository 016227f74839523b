"""Rounds of requests that follow one another: who comes when, and which steps count."""

from __future__ import annotations

from collections import Counter

import pytest

from bench.gpu_waves import full_window, waves_of


def test_every_wave_holds_every_prompt_once():
    prompts = [[i] for i in range(40)]
    asked, lengths = waves_of(prompts, 3, 200)
    assert len(asked) == len(lengths) == 120
    for wave in range(3):
        assert sorted(asked[40 * wave : 40 * wave + 40]) == prompts
    assert asked[:40] != asked[40:80]
    # The first are met in their midst: any part of the output is left of them.
    assert min(lengths[:40]) == 1
    assert max(Counter(lengths[:40]).values()) == 1
    assert sum(lengths[:40]) / 40 == pytest.approx(100, abs=5)
    assert set(lengths[40:]) == {200}


def test_only_full_steps_count():
    events = [
        ["launch", 0.0, 0.1, "mixed", 100],
        ["result", 0.0, 1.0, 50, 1000],
        ["result", 1.0, 2.0, 100, 700],
        ["result", 2.0, 2.5, 3, 3],
        ["result", 2.5, 4.0, 99, 400],
        ["result", 4.0, 9.0, 20, 1000],
        ["device", 60, 40, 300, 9000, 2e-3, 1e-3, 1e-4, 150],
        ["device", 30, 10, 300, 9000, 5e-3, 1e-3, 1e-4, 900],
        ["step", 60, 40, 300, 2e-3, False],
        ["step", 0, 100, 100, 6e-3, True],
        ["step", 0, 10, 10, 6e-3, True],
    ]
    found = full_window(events, 100)
    assert found["tokens_per_s"] == pytest.approx(403 / 2)
    assert found["tokens_per_s_of_device_time"] == pytest.approx(250 / 8e-3)
    assert found["steps"] == 2


def test_stock_has_no_device_times():
    events = [["result", t, t + 1.0, 8, 8] for t in range(3)]
    found = full_window(events, 8)
    assert found["tokens_per_s"] == 8.0
    assert found["tokens_per_s_of_device_time"] is None
