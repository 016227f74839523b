"""The sampling kernel compiled for a CUDA device: against its reference, and as a distribution."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats
from triton.runtime.interpreter import InterpretedFunction

from aspire_sglang.kernels import sample_tokens as module
from tests.kernels import cases

pytestmark = pytest.mark.skipif(
    isinstance(module._best_kernel, InterpretedFunction),
    reason="triton was imported for its interpreter; run tests/gpu in a process of its own",
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [1, 2, 7, 64, 257])
def test_equals_the_reference(rows, dtype):
    cases.check_sample_tokens(rows, 3001, dtype, "cuda", seed=rows)


def test_equals_the_reference_on_a_large_vocabulary():
    cases.check_sample_tokens(4, 151_936, torch.float32, "cuda", seed=1)


def draw(logits: torch.Tensor, temperature: float, draws: int, key: int = 5) -> torch.Tensor:
    """``draws`` samples of one distribution ``[V]``, at as many positions."""
    device = logits.device
    tokens = torch.empty(draws, dtype=torch.int64, device=device)
    module.sample_tokens(
        logits.expand(draws, -1),
        torch.zeros(draws, dtype=torch.int32, device=device),
        torch.arange(draws, device=device),
        torch.tensor([temperature], device=device),
        torch.tensor([key], dtype=torch.int32, device=device),
        torch.tensor([-key], dtype=torch.int32, device=device),
        torch.empty(module.partial_size(draws), dtype=torch.int64, device=device),
        tokens,
    )
    return tokens


def as_rows(logits: torch.Tensor, draws: int) -> torch.Tensor:
    # Rows may overlap in memory: the kernel only reads them.
    return logits.view(1, -1).expand(draws, -1)


@pytest.mark.parametrize("temperature", [0.3, 0.7, 1.0, 2.0])
def test_two_hundred_thousand_samples_follow_the_distribution(temperature):
    generator = torch.Generator().manual_seed(7)
    logits = 4 * torch.randn(49_152, generator=generator)
    draws = 200_000
    probs = torch.softmax(logits.double() / temperature, dim=0).numpy()
    tokens = draw(as_rows(logits.cuda(), draws), temperature, draws).cpu().numpy()
    counts = np.bincount(tokens, minlength=len(probs))
    order = np.argsort(-probs)
    expected = probs[order] * draws
    often = expected >= 20
    # Rare tokens are judged too, pooled by decade of probability.
    seen, wanted = [*counts[order][often]], [*expected[often]]
    decade = np.floor(np.log10(np.maximum(probs[order][~often], 1e-30)))
    for value in np.unique(decade):
        pool = decade == value
        if expected[~often][pool].sum() >= 20:
            seen.append(counts[order][~often][pool].sum())
            wanted.append(expected[~often][pool].sum())
    rest = draws - sum(wanted)
    if rest > 5:
        seen.append(draws - sum(seen))
        wanted.append(rest)
    seen, wanted = np.array(seen, dtype=float), np.array(wanted)
    assert stats.chisquare(seen, wanted * seen.sum() / wanted.sum()).pvalue > 1e-3


def test_rare_tokens_come_as_often_as_they_should():
    """A probability of 2e-6 in all, spread over 40,000 tokens of 5e-11 each."""
    logits = torch.full((40_001,), float(np.log(5e-11)))
    logits[0] = 0.0
    draws, hits = 4_000_000, 0
    for key in range(1, 9):
        hits += int((draw(as_rows(logits.cuda(), 500_000), 1.0, 500_000, key) > 0).sum())
    low, high = stats.poisson.interval(0.999, draws * 2e-6)
    assert low <= hits <= high


def test_neighbouring_positions_are_independent():
    logits = torch.zeros(8)
    tokens = draw(as_rows(logits.cuda(), 200_000), 1.0, 200_000).cpu().numpy()
    table = np.zeros((8, 8))
    np.add.at(table, (tokens[:-1], tokens[1:]), 1)
    assert stats.chi2_contingency(table).pvalue > 1e-3


def test_in_a_graph():
    """A captured launch follows the temperatures, keys and positions of each replay."""
    device, rows, vocab = "cuda", 9, 5000
    logits = torch.randn(rows, vocab, device=device)
    token_row = torch.arange(rows, dtype=torch.int32, device=device)
    positions = torch.zeros(rows, dtype=torch.int64, device=device)
    temperature = torch.zeros(rows, device=device)
    low, high = torch.zeros((2, rows), dtype=torch.int32, device=device)
    partial = torch.empty(module.partial_size(rows), dtype=torch.int64, device=device)
    tokens = torch.empty(rows, dtype=torch.int64, device=device)

    def step():
        module.sample_tokens(logits, token_row, positions, temperature, low, high, partial, tokens)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for seed in range(5):
        rng = torch.Generator().manual_seed(seed)
        logits.copy_(torch.randn(rows, vocab, generator=rng))
        positions.copy_(torch.randint(0, 9999, (rows,), generator=rng))
        temperature.copy_((seed % 2) * torch.rand(rows, generator=rng))
        low.copy_(torch.randint(-99, 99, (rows,), generator=rng))
        tokens.fill_(-1)
        graph.replay()
        torch.cuda.synchronize()
        replayed = tokens.clone()
        step()
        assert torch.equal(replayed, tokens)
        if seed % 2 == 0:
            assert torch.equal(tokens, logits.argmax(dim=-1))
