"""The forecast at start-up: what drafting is worth by the step costs."""

import pytest

from aspire_sglang.speculation.cost_model import CostModel
from aspire_sglang.speculation.forecast import describe, forecast, forecasts

MEMORY_BOUND = CostModel(fixed=1e-3, per_token=1e-6, per_kv=1e-6)
COMPUTE_BOUND = CostModel(fixed=1e-3, per_token=1e-3, per_kv=1e-9, per_pair=1e-6)


def by_hand(cost: CostModel, rows: int, context: int, reads: int, gamma: int) -> float:
    """Tokens per second of drafts of one length."""
    fixed, per_token, per_kv, per_pair = cost.coefficients
    queries, seen = gamma + 1, context + gamma + 1
    verify = fixed + rows * (per_token * queries + per_kv * seen + per_pair * queries * seen)
    draft = fixed + rows * (per_token + per_kv * reads + per_pair * reads)
    return sum(0.9**n for n in range(gamma + 1)) / (verify + gamma * draft)


@pytest.mark.parametrize("rows", [1, 8])
def test_it_is_the_best_length_over_none(rows: int) -> None:
    speeds = [by_hand(MEMORY_BOUND, rows, 6000, 512, gamma) for gamma in range(17)]
    found = forecast(MEMORY_BOUND, rows, 6000, 512, gamma_max=16)
    assert found.gamma == speeds.index(max(speeds)) > 0
    assert found.speedup == pytest.approx(max(speeds) / speeds[0], rel=1e-9)


def test_where_arithmetic_decides_nothing_is_promised() -> None:
    found = forecast(COMPUTE_BOUND, 8, 6000, 512, gamma_max=16)
    assert (found.gamma, found.speedup) == (0, 1.0)
    assert "8 x 6000 tokens 1.00x (no drafts)" in describe([found])


def test_loads_are_those_that_the_server_holds() -> None:
    found = forecasts(MEMORY_BOUND, lambda lens: [512] * len(lens), 16, 8, 8192, 15_000)
    assert [(each.rows, each.context) for each in found] == [(8, 500), (7, 2000), (2, 6000)]
    assert [each.speedup for each in found] == sorted(each.speedup for each in found)
    assert describe(found).count("x (") == 3


def test_a_server_of_short_contexts_promises_nothing() -> None:
    assert forecasts(MEMORY_BOUND, lambda lens: [], 16, 8, 400, 15_000) == []
    assert "no forecast" in describe([])
