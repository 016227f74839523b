"""Replayed acceptance: recorded runs as traces, and a schedule that knows them."""

import numpy as np
import pytest

from aspire_sglang.speculation.cost_model import CostModel
from aspire_sglang.speculation.policies import make_policy
from bench.replay import OraclePolicy, traces_of
from bench.simulator import Workload, simulate

KV_BOUND = CostModel(1e-3, 1e-5, 1e-6)
TOKEN_BOUND = CostModel(1e-3, 1e-1, 1e-9)
WORK = Workload(requests=2, contexts=(4000, 6000))


def test_runs_become_outcomes():
    traces = traces_of(np.array([[2, 4], [0, 1]]), gamma=4)
    assert traces == [[True, True, False, False], [True, True, True, True, True, False]]


def test_a_replay_accepts_what_the_trace_holds():
    # Three accepted drafts, then a rejected one, for ever.
    done = simulate(
        make_policy("fixed", gamma=5), WORK, KV_BOUND, 60, traces=[[True] * 3 + [False]]
    )
    assert done.tokens == 4 * len(done.lengths)
    done = simulate(
        make_policy("fixed", gamma=2), WORK, KV_BOUND, 60, traces=[[True] * 3 + [False]]
    )
    # Two accepted and the next token; then at once the rejected one, and so on.
    assert done.tokens < 3 * len(done.lengths)


def test_the_oracle_drafts_what_will_be_accepted():
    traces = [[True] * 3 + [False] + [True] * 6 + [False] + [False]]
    done = simulate(OraclePolicy(), WORK, KV_BOUND, 300, oracle=True, traces=traces)
    assert set(done.lengths) <= {0, 3, 6}
    assert done.tokens == sum(length + 1 for length in done.lengths)


def test_the_oracle_decodes_plainly_where_drafts_never_pay():
    traces = [[True] * 8 + [False]]
    done = simulate(OraclePolicy(), WORK, TOKEN_BOUND, 50, oracle=True, traces=traces)
    assert set(done.lengths) == {0}


@pytest.mark.parametrize("name", ["fixed", "aspire", "feedback", "constant_cost", "global"])
def test_nobody_beats_the_oracle(name):
    rng = np.random.default_rng(0)
    traces = [(rng.random(400) < rate).tolist() for rate in (0.8, 0.95)]
    best = simulate(OraclePolicy(), WORK, KV_BOUND, 800, oracle=True, traces=traces).rate
    assert simulate(make_policy(name), WORK, KV_BOUND, 800, traces=traces).rate < best
