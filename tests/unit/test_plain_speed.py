"""Measured times of plain steps over predicted ones."""

from __future__ import annotations

import pytest

from aspire_sglang.speculation.plain_speed import PlainSpeed


def test_learns_where_it_measured_only():
    speed = PlainSpeed()
    assert speed.ratio(64, 2.4e-3) is None
    speed.observe(64, 2.4e-3, 1.8e-3)
    assert speed.ratio(64, 2.4e-3) == pytest.approx(0.75)
    assert speed.ratio(70, 2.5e-3) == pytest.approx(0.75)
    assert speed.ratio(8, 2.4e-3) is None
    assert speed.ratio(64, 4.8e-3) is None


def test_follows_a_change():
    speed = PlainSpeed()
    speed.observe(1, 2e-3, 1e-3)
    for _ in range(8):
        speed.observe(1, 2e-3, 1.6e-3)
    assert speed.ratio(1, 2e-3) == pytest.approx(0.8, abs=0.01)


def test_is_bounded():
    speed = PlainSpeed()
    speed.observe(4, 1e-3, 9e-3)
    assert speed.ratio(4, 1e-3) == 1.0
    assert speed.seconds(4, 1e-3) == pytest.approx(9e-3)
    assert speed.seconds(64, 1e-3) == 1e-3
    speed.observe(1, 1e-3, 1e-9)
    assert speed.ratio(1, 1e-3) == pytest.approx(0.3)
    assert set(speed.report()) == {"1 rows, 0.98 ms", "4 rows, 0.98 ms"}


@pytest.mark.parametrize("given", [(0, 1.0, 1.0), (1, 0.0, 1.0), (1, 1.0, 0.0)])
def test_refuses_nonsense(given):
    with pytest.raises(ValueError, match="positive"):
        PlainSpeed().observe(*given)
