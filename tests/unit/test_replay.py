"""Replayed acceptance: recorded runs as traces, and a schedule that knows them."""

import json
from pathlib import Path

import numpy as np
import pytest

from aspire_sglang.speculation.cost_model import CostModel
from aspire_sglang.speculation.policies import make_policy
from bench.replay import OraclePolicy, read_record, traces_of
from bench.simulator import Workload, simulate
from bench.simulator_check import compare

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


def test_requests_end_and_others_take_their_places():
    traces = [[True] * 3 + [False], [True] * 9 + [False]]
    work = Workload(prompts=(4000, 6000), requests=2, new_tokens=40, waves=3)
    done = simulate(make_policy("fixed", gamma=3), work, KV_BOUND, 10**6, traces=traces)
    # Two that are met in their midst, and four whole ones; nobody writes a token too many.
    assert 4 * 40 < done.tokens <= 6 * 40
    assert 0 < done.full_tokens < done.tokens
    assert 0.0 < done.full_seconds < done.seconds
    together = Workload(prompts=(4000, 6000), requests=2, new_tokens=40)
    assert simulate(make_policy("aspire"), together, KV_BOUND, 10**6, traces=traces).tokens == 80


def test_a_record_is_read(tmp_path):
    record = {"gamma": 4, "prompt_tokens": [7, 9], "temperature 0.7": [[4, 1], [0]]}
    path = tmp_path / "record.json"
    path.write_text(json.dumps(record))
    traces, prompts = read_record(path, 0.7)
    assert traces == [[True] * 5 + [False], [False]]
    assert prompts == (7, 9)
    with pytest.raises(KeyError):
        read_record(path, 0.0)


def test_the_simulator_is_near_what_was_measured():
    """Of an H200: a schedule of each kind, within what rounds there differ by."""
    results = Path(__file__).parents[2] / "bench" / "results"
    found = json.loads((results / "h200-schedules.json").read_text())["waves"]
    wanted = "refresh, staggered", "refresh, the paper's rule"
    table = {name: found["temperature 0.7"][name] for name in wanted}
    few = {"temperature 0.7": table, "new_tokens": found["new_tokens"], "waves": found["waves"]}
    cost = CostModel(1.45e-3, 0.93e-6, 6.7e-9)
    lines = compare(few, results / "h200-accepts.json", cost)["temperature 0.7"]
    assert len(lines["lines"]) == 3
    assert lines["worst_error"] < 0.05


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
