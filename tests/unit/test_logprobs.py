"""Log-probabilities and hidden states land where SGLang's result processing reads them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from aspire_sglang.runtime.hidden_states import report_hidden_states
from aspire_sglang.runtime.logprobs import move_logprobs, report_logprobs

# Batch rows 0 and 2 draft, rows 1, 3 and 4 verify 2, 0 and 1 drafts.
VERIFY, PENDING, ACCEPT = [1, 3, 4], [3, 2, 0, 0, 1], [2, 1, 2]
TOKENS = torch.tensor([[11, 12, 0, 0], [13, 0, 0, 0], [14, 15, 0, 0]])
FIRST = [0, 3, 4]
"""First row of logits per verified row; there are 6."""


def run(*, all_greedy=False, wants=(True, True, True), nums=None, lists=None):
    logits = torch.randn(6, 40, generator=torch.Generator().manual_seed(0))
    returns = dict(zip(VERIFY, wants, strict=True))
    batch = SimpleNamespace(
        reqs=[SimpleNamespace(return_logprob=returns.get(row, True)) for row in range(5)],
        sampling_info=SimpleNamespace(
            is_all_greedy=all_greedy,
            temperatures=torch.tensor([1.0, 0.5, 1.0, 2.0, 0.7]).view(-1, 1),
        ),
        top_logprobs_nums=nums,
        token_ids_logprobs=lists,
    )
    output = SimpleNamespace()
    report_logprobs(output, batch, VERIFY, PENDING, logits, TOKENS, ACCEPT)
    temperature = 1.0 if all_greedy else batch.sampling_info.temperatures
    owner = [1, 1, 1, 3, 4, 4]
    scaled = logits if all_greedy else logits / temperature[owner]
    return output, torch.log_softmax(scaled, -1)


@pytest.mark.parametrize("all_greedy", [True, False])
def test_each_accepted_token_has_its_logprob(all_greedy):
    output, expected = run(all_greedy=all_greedy)
    found = output.next_token_logprobs
    assert found.shape == TOKENS.shape
    for place, accepted in enumerate(ACCEPT):
        for j in range(accepted):
            wanted = expected[FIRST[place] + j, TOKENS[place, j]]
            assert found[place, j].item() == pytest.approx(wanted.item(), abs=1e-6)
    assert not hasattr(output, "next_token_top_logprobs_val")
    assert not hasattr(output, "next_token_token_ids_logprobs_val")


def test_best_and_listed_tokens_of_those_who_asked():
    output, expected = run(nums=[0, 3, 0, 0, 5], lists=[None, None, None, [7, 9], [1]])
    best = output.next_token_top_logprobs_val, output.next_token_top_logprobs_idx
    listed = output.next_token_token_ids_logprobs_val, output.next_token_token_ids_logprobs_idx
    assert all(len(field) == TOKENS.numel() for field in best + listed)
    for place, (row, k) in enumerate([(1, 3), (3, 0), (4, 5)]):
        for j in range(ACCEPT[place]):
            cell, wanted = place * 4 + j, expected[FIRST[place] + j]
            assert best[0][cell].tolist() == pytest.approx(wanted.topk(k).values.tolist())
            assert best[1][cell].tolist() == wanted.topk(k).indices.tolist()
            ids = {1: [], 3: [7, 9], 4: [1]}[row]
            assert listed[0][cell].tolist() == pytest.approx(wanted[ids].tolist())
            assert list(listed[1][cell]) == ids


def test_only_rows_that_did_not_ask_verified():
    output, _ = run(wants=(False, False, False), nums=[4] * 5, lists=[[1]] * 5)
    assert output.next_token_logprobs.tolist() == [[0.0] * 4] * 3


def test_hidden_states_of_accepted_tokens():
    # Two draft rows first, then 3 + 1 + 2 query tokens of the verify rows.
    output = SimpleNamespace(hidden_states=torch.arange(8.0).view(8, 1).repeat(1, 2))
    report_hidden_states(output, VERIFY, PENDING, ACCEPT, stride=4)
    assert output.hidden_states.shape == (12, 2)
    assert output.hidden_states[:, 0].view(3, 4).tolist() == [
        [2, 3, 0, 0],
        [5, 0, 0, 0],
        [6, 7, 0, 0],
    ]


def test_a_prefill_of_which_some_requests_list_no_ids() -> None:
    """SGLang's own function, which knows tensors only, with the hook around it."""
    from sglang.srt.managers.scheduler_components.batch_result_processor import (
        SchedulerBatchResultProcessor,
    )

    output = SimpleNamespace(
        next_token_logprobs=torch.tensor([-0.5, -1.0]),
        input_token_logprobs=None,
        next_token_top_logprobs_val=None,
        next_token_token_ids_logprobs_val=[torch.tensor([-2.0, -3.0]), []],
    )
    move = SchedulerBatchResultProcessor.move_logprobs_to_cpu
    original = getattr(move, "__wrapped__", move)
    move_logprobs(original, None, batch=SimpleNamespace(return_logprob=True), logits_output=output)
    assert output.next_token_token_ids_logprobs_val == [[-2.0, -3.0], []]
