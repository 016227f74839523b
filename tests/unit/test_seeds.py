"""Seeded requests: one text for a seed, whoever draws it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from aspire_sglang.runtime.batching import build_plan
from aspire_sglang.runtime.draft_state import DraftState
from aspire_sglang.runtime.sampler import StepSampler
from aspire_sglang.runtime.seeds import SEEDS, carry_seeds, check_seed, sample_seeded, seeds_of
from aspire_sglang.sampling import TOP_K_ALL, draw_coupled, gumbel_noise, sample_coupled
from aspire_sglang.speculation.acceptance import make_estimator

VOCAB = 50
TARGET = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(1)) * 2
DRAFT = TARGET + torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(2))
"""Two models: row t holds the logits after token t."""

# seed, temperature, top-k, top-p, min-p
REQUESTS = [
    (7, 1.0, TOP_K_ALL, 1.0, 0.0),
    (-(2**62), 0.7, TOP_K_ALL, 0.9, 0.0),
    (7, 1.3, 5, 1.0, 0.0),
    (2**63 - 1, 1.0, TOP_K_ALL, 1.0, 0.2),
    (None, 1.0, TOP_K_ALL, 1.0, 0.0),
    (9, 1.0, 1, 1.0, 0.0),  # greedy
]
PROMPT = 10
"""Tokens of each prompt; its last one is token 3."""


def sampling_info(requests):
    seeds, temperature, top_k, top_p, min_p = zip(*requests, strict=True)
    return SimpleNamespace(
        temperatures=torch.tensor(temperature).view(-1, 1),
        top_ks=torch.tensor(top_k),
        top_ps=torch.tensor(top_p),
        min_ps=torch.tensor(min_p),
        sampling_seed=None,
        **{SEEDS: [None if k == 1 else seed for seed, k in zip(seeds, top_k, strict=True)]},
    )


def plain(requests, length: int) -> list[list[int]]:
    """The texts of SGLang's sampler with the hook."""
    info = sampling_info(requests)

    def stock(_, probs, *args):
        # Greedy rows are greedy for SGLang too; what it draws for seeded rows must not matter.
        return probs.argmax(-1).int()

    last = torch.full((len(requests),), 3)
    texts: list[list[int]] = [[] for _ in requests]
    for step in range(length):
        probs = torch.softmax(TARGET[last] / info.temperatures, -1)
        positions = torch.full((len(requests),), PROMPT - 1 + step)
        last = sample_seeded(stock, None, probs, info, positions, False).long()
        for text, token in zip(texts, last.tolist(), strict=True):
            text.append(token)
    return texts


def speculate(requests, length: int, lengths: list[int]) -> tuple[list[list[int]], int]:
    """The texts of the step sampler, request i drafting ``lengths[i]`` tokens per verify; and how
    many drafts of seeded requests were accepted."""
    n, depth = len(requests), max(lengths)
    info = sampling_info(requests)
    state = DraftState(n + 1, depth, "cpu", lambda: make_estimator("beta"))
    sampler = StepSampler(state, confidence=True)
    slots = list(range(1, n + 1))
    states = [state.get(slot, 1) for slot in slots]
    table = torch.zeros((n + 1, PROMPT + length + 2 * depth), dtype=torch.int32)
    texts: list[list[int]] = [[] for _ in requests]
    bonus, accepted = torch.full((n,), 3), 0
    while any(len(text) < length for text in texts):
        # The first token would come from the prefill: here the prompt's last token is the bonus.
        seq_lens = [min(PROMPT - 1 + len(text), PROMPT - 1 + length) for text in texts]
        verify = [s.pending >= k for s, k in zip(states, lengths, strict=True)]
        plan = build_plan(
            slots=slots,
            seq_lens=seq_lens,
            pending=[s.pending for s in states],
            verify=verify,
            bonus=bonus,
            draft_tokens=state.tokens,
            req_to_token=table,
        )
        drafts = len(plan.draft_rows)
        logits = torch.cat([DRAFT[plan.input_ids[:drafts]], TARGET[plan.input_ids[drafts:]]])
        seeds = getattr(info, SEEDS)
        outcome = sampler.step(plan, states, logits, info, seeds)
        for place, row in enumerate(plan.verify_rows):
            run = outcome.tokens[place, : outcome.accept_lens[place]].tolist()
            texts[row] = (texts[row] + run)[:length]
            bonus[row] = texts[row][-1]
            accepted += (len(run) - 1) * (seeds[row] is not None)
            state.settle(states[row], len(run) - 1)
    return texts, accepted


SEEDED = [i for i, request in enumerate(REQUESTS) if request[0] is not None]


@pytest.mark.parametrize("lengths", [[4] * 6, [1, 2, 3, 4, 2, 1], [0, 3, 0, 3, 3, 0]], ids=str)
def test_a_seed_gives_plain_decodings_text(lengths):
    expected = plain(REQUESTS, 40)
    found, accepted = speculate(REQUESTS, 40, lengths)
    assert accepted > 20, "void: no draft of a seeded request was accepted"
    for i in SEEDED:
        assert found[i] == expected[i]


@pytest.mark.parametrize("i", SEEDED)
def test_neighbours_do_not_change_the_text(i):
    assert plain(REQUESTS[i : i + 1], 40)[0] == plain(REQUESTS, 40)[i]
    assert speculate(REQUESTS[i : i + 1], 40, [3])[0][0] == plain(REQUESTS, 40)[i]


def test_seeds_and_requests_matter():
    texts = {tuple(plain([(seed, 1.0, TOP_K_ALL, 1.0, 0.0)], 20)[0]) for seed in range(20)}
    assert len(texts) == 20
    free = {tuple(speculate([(None, 1.0, TOP_K_ALL, 1.0, 0.0)], 20, [3])[0][0]) for _ in range(20)}
    assert len(free) > 15, "requests without a seed must vary"


def test_rows_drawn_one_by_one_equal_rows_drawn_together():
    probs = torch.softmax(TARGET, -1)
    seed, position = torch.arange(VOCAB) - 7, torch.arange(VOCAB) * 1000
    together = sample_coupled(probs, gumbel_noise(seed, position, VOCAB))
    assert draw_coupled(probs, seed, position).tolist() == together.tolist()


def test_seeds_travel_with_the_batch_of_one_forward():
    def req(seed, top_k):
        return SimpleNamespace(sampling_params=SimpleNamespace(sampling_seed=seed, top_k=top_k))

    reqs = [req(5, TOP_K_ALL), req(None, TOP_K_ALL), req(5, 1)]
    assert seeds_of(reqs) == [5, None, None]
    batch = SimpleNamespace(reqs=reqs, sampling_info=SimpleNamespace())
    seen = carry_seeds(lambda _, b, **k: getattr(b.sampling_info, SEEDS), None, batch, x=1)
    assert seen == [5, None, None]
    assert carry_seeds(lambda *a, **k: "ran", None, None, forward_batch=1) == "ran"


def test_deterministic_inference_keeps_sglangs_own_sampler():
    info = sampling_info(REQUESTS)
    info.sampling_seed = torch.zeros(len(REQUESTS))
    marker = torch.zeros(len(REQUESTS), dtype=torch.int32)
    probs = torch.softmax(TARGET[: len(REQUESTS)], -1)
    assert sample_seeded(lambda *a: marker, None, probs, info, None, False) is marker


def test_probabilities_stay_for_the_logprobs():
    info = sampling_info(REQUESTS)
    probs = torch.softmax(TARGET[: len(REQUESTS)], -1)
    before = probs.clone()
    positions = torch.arange(len(REQUESTS))
    sample_seeded(lambda *a: torch.zeros(6, dtype=torch.int32), None, probs, info, positions, False)
    assert torch.equal(probs, before)


@pytest.mark.parametrize("seed", [None, 0, -1, 2**63 - 1, -(2**63)])
def test_good_seeds(seed):
    check_seed(seed)


@pytest.mark.parametrize("seed", [2**63, -(2**63) - 1, 1.0, "7", True, [1]])
def test_bad_seeds(seed):
    with pytest.raises(ValueError, match="sampling_seed"):
        check_seed(seed)
