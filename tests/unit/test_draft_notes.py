"""What the sampler notes of drafts, and who learns from it."""

from __future__ import annotations

import pytest
import torch

from aspire_sglang.config import ConfigError, parse_config
from aspire_sglang.runtime.batching import build_plan
from aspire_sglang.runtime.draft_state import DraftState
from aspire_sglang.runtime.sampler import StepSampler
from aspire_sglang.runtime.seeds import SEEDS
from aspire_sglang.sampling import TOP_K_ALL
from aspire_sglang.speculation.acceptance import make_estimator
from aspire_sglang.speculation.confidence import ConfidenceCalibration
from aspire_sglang.speculation.predictor import AcceptancePredictor, features
from tests.unit.test_seeds import VOCAB, sampling_info

GREEDY = (None, 1.0, 1, 1.0, 0.0)
SAMPLED = (None, 0.7, TOP_K_ALL, 1.0, 0.0)
SEEDED = (5, 0.7, TOP_K_ALL, 0.9, 0.0)


def draft_once(requests, **options):
    """One draft of every request; the state, its slots and the logits."""
    n = len(requests)
    info = sampling_info(requests)
    state = DraftState(n, 4, "cpu", lambda: make_estimator("beta"))
    sampler = StepSampler(state, confidence=True, **options)
    states = [state.get(slot, 1) for slot in range(n)]
    plan = build_plan(
        slots=list(range(n)),
        seq_lens=[5] * n,
        pending=[0] * n,
        verify=[False] * n,
        bonus=torch.zeros(n, dtype=torch.int64),
        draft_tokens=state.tokens,
        req_to_token=torch.zeros((n, 20), dtype=torch.int32),
    )
    logits = torch.randn(n, VOCAB, generator=torch.Generator().manual_seed(4)) * 3
    sampler.step(plan, states, logits, info, getattr(info, SEEDS))
    return state, states, logits


def test_greedy_drafts_alone_are_noted_by_default():
    state, states, logits = draft_once([GREEDY, SAMPLED])
    assert states[0].confidence == pytest.approx([float(logits[0].softmax(-1).max())])
    assert states[1].confidence == []
    assert state.survival(states[1]) is None


def test_sampled_drafts_are_noted_with_the_probability_they_were_drawn_with():
    state, states, logits = draft_once([SAMPLED, SEEDED], sampled=True)
    probs = (logits[0] / 0.7).softmax(-1)
    assert states[0].confidence == pytest.approx([float(probs[state.tokens[0, 0]])], rel=1e-2)
    # The seeded request draws from the most likely tokens that hold 90 % of the mass.
    best, order = (logits[1] / 0.7).softmax(-1).sort(descending=True)
    kept = best.cumsum(0) - best < 0.9
    place = int((order == state.tokens[1, 0]).nonzero())
    assert states[1].confidence == pytest.approx([float(best[place] / best[kept].sum())], rel=1e-4)
    assert states[0].sampled
    assert states[1].sampled


def test_notes_are_kept_as_the_judge_wants_them():
    state, states, _ = draft_once([GREEDY, SAMPLED], sampled=True, gaps=True)
    state.use_judges(AcceptancePredictor)
    assert states[0].confidence == []  # notes for another judge are worth nothing
    seen = []
    for slot, probability, gap in ((0, 0.6, 1.5), (1, 0.3, 0.2)):
        seen.append(features(probability, gap, states[slot].pending, states[slot].acceptance.rate))
        state.note(states[slot], bool(slot), probability, gap)
        assert (states[slot].confidence[0] == seen[-1]).all()


def test_the_gap_is_that_of_the_best_two_tokens():
    noted = []

    class Judge(ConfidenceCalibration):
        def token(self, probability, gap, position, rate):
            noted.append((gap, position))
            return probability

    original = DraftState.use_judges
    try:
        DraftState.use_judges = lambda self, make: original(self, Judge)
        _, _, logits = draft_once([GREEDY, SAMPLED], sampled=True, gaps=True)
    finally:
        DraftState.use_judges = original
    for (gap, position), row, temperature in zip(noted, logits, (1.0, 0.7), strict=True):
        best = row.topk(2).values
        assert gap == pytest.approx(float((best[0] - best[1]) / temperature), rel=1e-3)
        assert position == 0


def test_greedy_and_sampled_drafts_teach_different_judges():
    state, states, _ = draft_once([GREEDY, SAMPLED], sampled=True)
    before = state.judges[True].rate(states[1].confidence[0], 0.9)
    state.settle(states[0], 0)
    assert state.judges[True].rate(states[1].confidence[0], 0.9) == before
    token = states[1].confidence[0]
    state.settle(states[1], 0)
    assert state.judges[True].rate(token, 0.9) < before


@pytest.mark.parametrize("option", ["sampled_confidence: true", "predictor: regression"])
def test_a_gpu_refuses_what_it_would_ignore(option):
    gpu_worker = pytest.importorskip("aspire_sglang.runtime.gpu_worker")
    config = parse_config({"scheduler": dict([option.split(": ")])}, "a test")
    with pytest.raises(ConfigError, match="run on a CPU only"):
        gpu_worker.GpuWorker._apply_config(object(), config)
