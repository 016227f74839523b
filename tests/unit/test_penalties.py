"""Penalties per position, against counting token by token."""

from __future__ import annotations

from array import array

import pytest
import torch

from aspire_sglang.sampling.penalties import Penalties, dense_terms, penalise

VOCAB = 12


def brute_force(
    logits: torch.Tensor, penalties: Penalties, output: list[int], drafts: list[int]
) -> torch.Tensor:
    """One position at a time, one token at a time."""
    expected = logits.clone()
    rows = len(logits)
    for row in range(rows):
        text = output + drafts[: len(drafts) + 1 - rows + row]
        for token in range(VOCAB):
            value = float(logits[row, token])
            count = text.count(token)
            value -= penalties.frequency * count
            if count:
                value -= penalties.presence
            if len(text) < penalties.min_new_tokens and token in penalties.stop_ids:
                value = -float("inf")
            if count:
                value = value * penalties.repetition if value < 0 else value / penalties.repetition
            expected[row, token] = value
    return expected


CASES = {
    "frequency": Penalties(frequency=1.5),
    "negative frequency": Penalties(frequency=-0.7),
    "presence": Penalties(presence=2.0),
    "repetition": Penalties(repetition=1.3),
    "repetition below 1": Penalties(repetition=0.5),
    "min_new_tokens": Penalties(min_new_tokens=7, stop_ids=(2, 9)),
    "all": Penalties(0.4, -0.3, 1.2, 6, (3,)),
    "none": Penalties(),
}


@pytest.mark.parametrize("output", [[], [5], [5, 3, 5, 0, 11]], ids=["empty", "one", "five"])
@pytest.mark.parametrize("drafts", [0, 1, 4])
@pytest.mark.parametrize("name", CASES)
def test_every_position_of_a_verified_run(name, output, drafts):
    torch.manual_seed(0)
    pending = [5, 5, 7, 3][:drafts]
    logits = torch.randn(drafts + 1, VOCAB)
    expected = brute_force(logits, CASES[name], output, pending)
    penalise(logits, CASES[name], array("q", output), pending)
    torch.testing.assert_close(logits, expected)


@pytest.mark.parametrize("name", CASES)
def test_a_draft_row_sees_all_pending_drafts(name):
    """Its logits are the last row that a verify of the same drafts would have."""
    logits = torch.randn(5, VOCAB)
    alone = logits[4:].clone()
    output, pending = [1, 2, 2], [4, 1, 4, 4]
    penalise(logits, CASES[name], output, pending)
    penalise(alone, CASES[name], output, pending)
    assert torch.equal(alone[0], logits[4])


def test_an_accepted_draft_counts_exactly_as_if_it_had_been_output():
    logits = torch.randn(1, VOCAB)
    other = logits.clone()
    penalties = CASES["all"]
    penalise(logits, penalties, [1, 2], [2, 3])
    penalise(other, penalties, [1, 2, 2, 3], [])
    assert torch.equal(logits, other)


def test_only_a_view_is_changed():
    whole = torch.zeros(4, VOCAB)
    penalise(whole[1:3], Penalties(presence=1.0), [6], [7])
    assert whole.nonzero().tolist() == [[1, 6], [2, 6], [2, 7]]


def test_arithmetic_keeps_the_type_of_the_logits():
    logits = torch.randn(2, VOCAB).bfloat16()
    expected = brute_force(logits.float(), Penalties(presence=1.0), [6], [7]).bfloat16()
    penalise(logits, Penalties(presence=1.0), [6], [7])
    torch.testing.assert_close(logits, expected)


def test_too_many_rows():
    with pytest.raises(ValueError, match="3 rows"):
        penalise(torch.zeros(3, VOCAB), Penalties(presence=1.0), [1, 2, 3], [4])


@pytest.mark.parametrize("name", CASES)
def test_dense_terms_act_as_the_penalties_do(name):
    logits = torch.randn(1, VOCAB)
    output = [3, 3, 8]
    additive, scaling = dense_terms(CASES[name], output, VOCAB)
    found = logits + additive
    found = torch.where(found < 0, found * scaling, found / scaling)
    penalise(logits, CASES[name], output, [])
    torch.testing.assert_close(found, logits)
