"""The GPU's sampler on the CPU, with the accept kernel in Triton's interpreter."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from aspire_sglang.attention.step_buffers import HostStep, StepBuffers, pack_step
from aspire_sglang.runtime.device_sampler import DeviceSampler
from aspire_sglang.runtime.device_state import DeviceState

VOCAB = 11


def sampling(greedy: list[bool]):
    n = len(greedy)
    return SimpleNamespace(
        is_all_greedy=all(greedy),
        temperatures=torch.ones(n, 1),
        top_ks=torch.tensor([1 if g else 1 << 30 for g in greedy], dtype=torch.int32),
        top_ps=torch.ones(n),
        min_ps=torch.zeros(n),
    )


def params(greedy: list[bool]):
    return [SimpleNamespace(top_k=1 if g else 1 << 30, top_p=1.0, min_p=0.0) for g in greedy]


def peaked(tokens: list[int]) -> torch.Tensor:
    return 50.0 * torch.nn.functional.one_hot(torch.tensor(tokens), VOCAB).float()


def run(greedy: list[bool]):
    """Requests 0 to 2 in slots 3, 1, 2: two drafts accepted out of three, a draft, a plain step."""
    state = DeviceState(4, 4, VOCAB, "cpu")
    state.drafts[3] = torch.tensor([5, 6, 7, 0])
    state.bonus[:] = torch.tensor([0, 1, 2, 3])
    state.token_probs[:] = 1.0
    state.stored[:] = torch.eye(VOCAB)[[0] * 12 + [5, 6, 7, 0]]
    step = HostStep.build([3, 1, 2], [3, 1, 0], [True, False, True])
    buffers = StepBuffers(4, 20, "cpu")
    view = buffers.load(pack_step(step, 4, 8, drafts_vote=True), 4, 8)
    view.row_lens[:] = torch.tensor([20, 30, 40, 0])
    state.pending[:] = torch.tensor([0, 1, 0, 3])
    # Query tokens: the draft row's, then four of the verify row, then the plain row's.
    logits = peaked([9, 5, 6, 8, 4, 10])
    outcome = DeviceSampler(state).step(step, view, logits, sampling(greedy), params(greedy))
    assert outcome.tokens.tolist() == [[5, 6, 8, 0, 0], [10, 0, 0, 0, 0]]
    assert outcome.accept_lens.tolist() == [3, 1]
    assert outcome.accept_lens.dtype == torch.int32
    assert state.bonus.tolist() == [0, 1, 10, 8]
    assert view.row_lens.tolist() == [20, 33, 41, 0]
    assert state.drafts[1, 1] == 9
    return state


def test_greedy_batch():
    run([True, True, True])


def test_sampled_batch_with_certain_logits():
    state = run([False, False, False])
    assert state.stored[1 * 4 + 1].argmax() == 9
    assert state.token_probs[1, 1] == 1.0


def test_mixed_batch():
    run([True, False, True])
    run([False, True, False])


def test_all_draft():
    state = DeviceState(3, 2, VOCAB, "cpu")
    step = HostStep.build([1, 2], [0, 1], [False, False])
    view = StepBuffers(2, 4, "cpu").load(pack_step(step, 2, 2, drafts_vote=True), 2, 2)
    for greedy in (True, False):
        state.pending[:] = torch.tensor([0, 0, 1])
        outcome = DeviceSampler(state).step(
            step, view, peaked([3, 4]), sampling([greedy] * 2), params([greedy] * 2)
        )
        assert outcome.tokens.shape == (0, 3)
        assert outcome.accept_lens.shape == (0,)
        assert (state.drafts[1, 0], state.drafts[2, 1]) == (3, 4)
