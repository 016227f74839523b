"""Sampling with shared noise: the kernel in Triton's interpreter, and the noise itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from aspire_sglang.kernels import reference
from aspire_sglang.kernels.sample_tokens import partial_size, sample_tokens, vocab_splits
from tests.kernels import cases


def test_philox_known_answers():
    """Of the Random123 distribution's test vectors."""
    zeros = reference.philox(0, np.zeros((1, 4), dtype=np.uint32))[0]
    assert [hex(word) for word in zeros] == ["0x6627e8d5", "0xe169c58d", "0xbc57ac4c", "0x9b00dbd8"]
    ones = reference.philox(2**64 - 1, np.full((1, 4), 2**32 - 1, dtype=np.uint32))[0]
    assert [hex(word) for word in ones] == ["0x408f276d", "0x41c83b0e", "0xa20bc7c6", "0x6d5451fd"]


def test_noise_is_exponential_and_independent_between_positions():
    first, second = (reference.exponentials(12345, position, 200_000) for position in (7, 8))
    for noise in (first, second):
        assert stats.kstest(noise, "expon").pvalue > 1e-3
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.01
    assert abs(np.corrcoef(first[:-1], first[1:])[0, 1]) < 0.01


def test_samples_follow_the_distribution():
    probs = np.array([0.5, 0.2, 0.15, 0.1, 0.03, 0.0149, 0.005, 1e-4])
    draws = 60_000
    # One row of noise holds many independent samples of a small vocabulary.
    noise = reference.exponentials(99, 3, draws * len(probs)).reshape(draws, -1)
    counts = np.bincount((np.log(probs) - np.log(noise)).argmax(1), minlength=len(probs))
    assert stats.chisquare(counts, probs * draws).pvalue > 1e-3


@pytest.mark.parametrize(("rows", "vocab"), [(1, 5000), (3, 70), (9, 4096), (40, 2500)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_equals_the_reference(rows, vocab, dtype):
    cases.check_sample_tokens(rows, vocab, dtype, "cpu", seed=rows)


def test_extreme_scores():
    """A single finite logit wins; of equal logits the lowest token; NaN never."""
    logits = torch.full((4, 3000), float("-inf"))
    logits[0, 2999], logits[1, 5] = -3e38, 0.0
    logits[2, 10], logits[2, 20], logits[2, 2500] = 1.0, 1.0, 1.0
    logits[3] = float("nan")
    logits[3, 17] = -100.0
    tokens = torch.full((4,), -1)
    sample_tokens(
        logits,
        torch.arange(4, dtype=torch.int32),
        torch.arange(4),
        torch.tensor([1.0, 1e-5, 0.0, 1.0]),
        torch.zeros(4, dtype=torch.int32),
        torch.zeros(4, dtype=torch.int32),
        torch.empty(partial_size(4), dtype=torch.int64),
        tokens,
    )
    assert tokens.tolist() == [2999, 5, 10, 17]


def test_the_launch_does_not_change_the_noise():
    assert {vocab_splits(rows, 49_152) for rows in (1, 64, 300, 5000)} == {24, 16, 3, 1}


def test_refuses_what_does_not_fit():
    rows = torch.zeros(2, dtype=torch.int32)
    good = (torch.zeros(2, 8), rows, rows, torch.ones(2), rows, rows)
    with pytest.raises(ValueError, match="partial"):
        sample_tokens(*good, torch.empty(1, dtype=torch.int64), torch.zeros(2, dtype=torch.int64))
    with pytest.raises(ValueError, match="temperature"):
        sample_tokens(
            *good[:3], torch.ones(2).double(), *good[4:], torch.empty(2000, dtype=torch.int64),
            torch.zeros(2, dtype=torch.int64),
        )  # fmt: skip
