"""Stop rules on recorded runs."""

import numpy as np
import pytest

from aspire_sglang.speculation.cost_model import CostModel
from bench.predictors import runs_of
from bench.stops import Batch, compare, play

BATCH = Batch(rows=4, context=6000, draft_kv=500, longest=6, cost=CostModel(1e-3, 1e-5, 1e-6))


def runs():
    """Drafts of a wide gap are accepted nearly always, others half of the time."""
    rng = np.random.default_rng(0)
    gap = np.where(rng.random((60, 8, 6)) < 0.7, 6.0, 0.3)
    kept = rng.random(gap.shape) < np.where(gap > 1, 0.99, 0.5)
    accepted = kept.cumprod(axis=2).sum(axis=2)
    return runs_of({"accepted": accepted, "gap": gap, "token_prob": np.full(gap.shape, 0.8)})


def test_a_stop_commits_what_was_accepted_before_it_and_one_token():
    recorded = runs()
    played = play(recorded, BATCH, lambda run, rate: 3)
    judged = recorded[len(recorded) // 8 :]
    tokens = sum(min(run["accepted"], 3) + 1 for run in judged)
    assert played["tokens_per_s"] == pytest.approx(tokens / (len(judged) * BATCH.seconds(3)))
    assert played["drafts"] == 3


def test_what_is_known_of_a_token_pays():
    found = {name: result["tokens_per_s"] for name, result in compare(runs(), BATCH).items()}
    assert found["regression"] > 1.02 * found["rate of the request"]
    assert found["regression"] > found["token probability in bins"]
    assert found["oracle"] == max(found.values())
