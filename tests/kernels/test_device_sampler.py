"""The GPU's sampler on the CPU, with its kernels in Triton's interpreter."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from aspire_sglang.attention.step_buffers import HostStep, StepBuffers, pack_step
from aspire_sglang.runtime.device_sampler import DeviceSampler, RequestSampling, choose_tokens
from aspire_sglang.runtime.device_state import DeviceState

VOCAB = 11


def sampling(params):
    n = len(params)
    return SimpleNamespace(
        is_all_greedy=all(p.top_k == 1 for p in params),
        temperatures=torch.tensor([p.temperature for p in params]).view(n, 1),
        top_ks=torch.tensor([p.top_k for p in params], dtype=torch.int32),
        top_ps=torch.tensor([p.top_p for p in params]),
        min_ps=torch.tensor([p.min_p for p in params]),
    )


def params_of(greedy: list[bool], **given):
    defaults = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0, "top_k": 1 << 30} | given
    return [SimpleNamespace(**(defaults | ({"top_k": 1} if g else {}))) for g in greedy]


def peaked(tokens: list[int]) -> torch.Tensor:
    return 50.0 * torch.nn.functional.one_hot(torch.tensor(tokens), VOCAB).float()


def stage(slots, pending, verify, params, rows, tokens):
    known = RequestSampling(5, seed=1)
    for slot, given in zip(slots, params, strict=True):
        known.set(slot, given)
    keys = np.arange(len(slots), dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    step = HostStep.build(slots, pending, verify, known.temperature[slots], keys)
    steps = StepBuffers(rows, 20, "cpu")
    return step, steps, steps.load(pack_step(step, rows, tokens, drafts_vote=True), rows, tokens)


@pytest.mark.parametrize("chosen", [False, True], ids=["after", "in-graph"])
@pytest.mark.parametrize(
    "greedy",
    [[True] * 3, [False] * 3, [True, False, True], [False, True, False]],
    ids=["greedy", "sampled", "mixed", "mixed-too"],
)
@pytest.mark.parametrize("given", [{}, {"top_p": 0.9}], ids=["plain", "filtered"])
def test_certain_logits(greedy, chosen, given):
    """Requests 0 to 2 in slots 3, 1, 2: two drafts accepted out of three, a draft, a plain step."""
    params = params_of(greedy, **given)
    state = DeviceState(4, 4, "cpu")
    state.drafts[3] = torch.tensor([5, 6, 7, 0])
    state.bonus[:] = torch.tensor([0, 1, 2, 3])
    step, steps, view = stage([3, 1, 2], [3, 1, 0], [True, False, True], params, 4, 8)
    view.row_lens[:] = torch.tensor([20, 30, 40, 0])
    state.pending[:] = torch.tensor([0, 1, 0, 3])
    # Query tokens: the draft row's, then four of the verify row, then the plain row's.
    logits = peaked([9, 5, 6, 8, 4, 10])
    if chosen:
        choose_tokens(steps, view, torch.cat([logits, torch.full((2, VOCAB), float("nan"))]))
    outcome = DeviceSampler(state, steps).step(
        step, view, logits, sampling(params), params, filtered=bool(given), chosen=chosen
    )
    assert outcome.tokens.tolist() == [[5, 6, 8, 0, 0], [10, 0, 0, 0, 0]]
    assert outcome.accept_lens.tolist() == [3, 1]
    assert outcome.accept_lens.dtype == torch.int32
    assert state.bonus.tolist() == [0, 1, 10, 8]
    assert view.row_lens.tolist() == [20, 33, 41, 0]
    assert state.drafts[1, 1] == 9


def test_all_draft():
    state = DeviceState(3, 2, "cpu")
    for greedy in (True, False):
        params = params_of([greedy] * 2)
        step, steps, view = stage([1, 2], [0, 1], [False, False], params, 2, 2)
        state.pending[:] = torch.tensor([0, 0, 1])
        outcome = DeviceSampler(state, steps).step(
            step, view, peaked([3, 4]), sampling(params), params, filtered=False, chosen=False
        )
        assert outcome.tokens.shape == (0, 3)
        assert outcome.accept_lens.shape == (0,)
        assert (state.drafts[1, 0], state.drafts[2, 1]) == (3, 4)


def test_draft_and_verify_of_a_position_meet_the_same_noise():
    """Equal logits, key and position give the same token: a draft like the target passes."""
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(3))
    params = params_of([False] * 2)
    found = []
    for rows in ([False, True], [True, False]):
        _, steps, view = stage([1, 2], [0, 0], rows, params, 2, 2)
        view.positions[:] = 77
        choose_tokens(steps, view, logits.expand(2, VOCAB).contiguous())
        found.append(dict(zip(view.order.tolist(), view.next_tokens.tolist(), strict=True)))
    assert found[0] == found[1]


def test_filters_are_kept():
    """Of top-k 2 no other token comes, whatever the noise."""
    params = params_of([False] * 3, top_k=2, temperature=5.0)
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(1))
    best = [set(row) for row in logits.topk(2).indices.tolist()]
    seen = [set(), set(), set()]
    state = DeviceState(4, 2, "cpu")
    for position in range(40):
        step, steps, view = stage([1, 2, 3], [0, 0, 0], [True] * 3, params, 3, 3)
        view.positions[:] = position
        outcome = DeviceSampler(state, steps).step(
            step, view, logits, sampling(params), params, filtered=True, chosen=False
        )
        for row, token in enumerate(outcome.tokens[:, 0].tolist()):
            seen[row].add(token)
    assert seen == best


def test_what_the_host_knows_of_requests():
    known = RequestSampling(6, seed=3)
    rows = [{"temperature": 0.7}, {"top_k": 1}, {"top_p": 0.5}, {"min_p": 0.1}, {"top_k": 7}]
    for slot, given in enumerate(rows):
        known.set(slot, params_of([False], **given)[0])
    assert known.temperature.tolist() == pytest.approx([0.7, 0.0, 1.0, 1.0, 1.0, 0.0])
    assert known.filtered.tolist() == [False, False, True, True, True, False]
    assert len(set(known.keys[:5].tolist())) == 5
    first = known.keys[0]
    known.set(0, params_of([False])[0])
    assert known.keys[0] != first
