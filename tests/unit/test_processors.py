"""The sampling chain against SGLang's own function."""

import ast
import importlib.util
from pathlib import Path
from typing import Optional

import pytest
import torch

from aspire_sglang.sampling import TOP_K_ALL, SamplingRows, target_probs
from aspire_sglang.sampling.processors import _MAX_CANDIDATES


@pytest.fixture(scope="module")
def plain_sampler():
    """SGLang's torch sampler. Only this function is compiled: importing SGLang takes ~30 s."""
    name = "top_k_top_p_min_p_sampling_from_probs_torch"
    spec = importlib.util.find_spec("sglang")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    path = Path(spec.submodule_search_locations[0], "srt", "layers", "sampler.py")
    functions = [
        node
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name == name
    ]
    namespace = {"torch": torch, "Optional": Optional}
    exec(compile(ast.Module(functions, []), str(path), "exec"), namespace)
    return namespace[name]


def plain_distribution(sampler, monkeypatch, logits, temperature, top_k, top_p, min_p):
    """What SGLang hands to ``torch.multinomial``, put back into vocabulary order."""
    seen = {}

    def capture(weights, num_samples):
        seen["weights"] = weights.clone()
        return weights.argmax(dim=-1, keepdim=True)

    probs = torch.softmax(logits / temperature.view(-1, 1), dim=-1)
    order = probs.sort(dim=-1, descending=True).indices
    monkeypatch.setattr(torch, "multinomial", capture)
    sampler(probs, top_k, top_p, min_p, bool((min_p > 0).any()), None, None)
    weights = torch.zeros_like(probs).scatter_(1, order, seen["weights"])
    return weights / weights.sum(dim=-1, keepdim=True)


def parameters():
    temperature, top_k, top_p, min_p = [], [], [], []
    for t in (0.3, 1.0, 1.7):
        for k in (2, 5, 40, TOP_K_ALL):
            for p in (1e-6, 0.5, 0.82, 0.95, 1.0):
                for m in (0.0, 0.1, 1.0):
                    temperature.append(t)
                    top_k.append(k)
                    top_p.append(p)
                    min_p.append(m)
    return temperature, top_k, top_p, min_p


@pytest.mark.parametrize("vocab", [7, 300, 3000])
@pytest.mark.parametrize("kind", ["smooth", "ties", "peaked", "flat"])
def test_equals_plain_decoding(plain_sampler, monkeypatch, vocab, kind):
    rows = SamplingRows.build(*parameters())
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(len(rows), vocab, generator=generator)
    if kind == "ties":
        logits = logits.round()
    elif kind == "peaked":
        logits *= 60
    elif kind == "flat":
        logits *= 0.01
    before = logits.clone()
    ours = target_probs(logits, rows)
    plain = plain_distribution(
        plain_sampler, monkeypatch, logits, rows.temperature, rows.top_k, rows.top_p, rows.min_p
    )
    assert torch.equal(logits, before)
    # A row of 3000 flat probabilities may sum past 1 by rounding: plain then drops a last token or
    # two of it although top_p is 1. Such rows differ by one token's mass, the others not at all.
    unfiltered = (rows.top_p == 1) & (rows.top_k >= vocab)
    exact = ~unfiltered
    assert torch.equal(ours[exact] > 0, plain[exact] > 0)
    torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-6)


def test_tie_that_straddles_the_cut_keeps_plain_number_of_tokens():
    logits = torch.zeros(3, 5000)
    rows = SamplingRows.build([1.0] * 3, [3, 50, TOP_K_ALL], [1.0, 1.0, 0.1], [0.0] * 3)
    kept = (target_probs(logits, rows) > 0).sum(dim=-1).tolist()
    assert kept[:2] == [3, 50]
    assert kept[2] in (500, 501)


def test_top_k_does_not_rescale_before_top_p():
    logits = torch.tensor([[0.3, 0.25, 0.2, 0.1, 0.1, 0.05]]).log()
    # Masses before each token are 0, .3, .55, .75: plain decoding keeps three at top_p 0.6.
    # Rescaled to the best four they would be 0, .35, .65, .88, and only two would stay.
    rows = SamplingRows.build([1.0], [4], [0.6], [0.0])
    assert (target_probs(logits, rows) > 0).sum() == 3


def test_cut_deeper_than_the_candidates():
    logits = torch.linspace(0, 0.1, 4 * _MAX_CANDIDATES).flip(0).view(1, -1)
    rows = SamplingRows.build([1.0], [-1], [0.9], [0.0])
    probs = torch.softmax(logits, dim=-1)
    kept = (probs.cumsum(-1) - probs) <= 0.9
    assert torch.equal(target_probs(logits, rows) > 0, kept)
    assert kept.sum() > _MAX_CANDIDATES


def test_greedy_rows_are_one_hot_in_any_mix():
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    rows = SamplingRows.build([0.0, 1.0, 1.0, 0.7], [-1, 1, -1, 5], [1.0] * 4, [0.0] * 4)
    assert rows.greedy.tolist() == [True, True, False, False]
    probs = target_probs(logits, rows)
    torch.testing.assert_close(probs.sum(-1), torch.ones(4))
    for i in (0, 1):
        assert probs[i, logits[i].argmax()] == 1.0
    torch.testing.assert_close(probs[2], torch.softmax(logits[2], -1))
    assert (probs[3] > 0).sum() == 5
    all_greedy = rows.take(rows.greedy)
    assert torch.equal(target_probs(logits[:2], all_greedy), probs[:2])


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"), [(TOP_K_ALL, 1.0, 1.0), (1, 1.0, 0.0), (TOP_K_ALL, 1e-6, 0.0)]
)
def test_extreme_filters_mean_greedy(top_k, top_p, min_p):
    logits = torch.randn(3, 200, generator=torch.Generator().manual_seed(1))
    rows = SamplingRows.build([1.0] * 3, [top_k] * 3, [top_p] * 3, [min_p] * 3)
    probs = target_probs(logits, rows)
    assert torch.equal(probs.argmax(-1), logits.argmax(-1))
    assert ((probs > 0).sum(-1) == 1).all()


def test_half_precision_logits_are_computed_in_float32():
    logits = torch.randn(2, 64, generator=torch.Generator().manual_seed(2)).bfloat16()
    rows = SamplingRows.build([0.8, 0.8], [-1, 4], [1.0, 0.9], [0.0, 0.0])
    probs = target_probs(logits, rows)
    assert probs.dtype == torch.float32
    assert torch.equal(probs, target_probs(logits.float(), rows))


def test_expand_and_take():
    rows = SamplingRows.build([0.5, 0.0, 1.0], [3, -1, 7], [0.9, 1.0, 1.0], [0.0, 0.0, 0.2])
    expanded = rows.expand(torch.tensor([2, 0, 3]), total=5)
    torch.testing.assert_close(expanded.temperature, torch.tensor([0.5, 0.5, 1.0, 1.0, 1.0]))
    assert expanded.top_k.tolist() == [3, 3, 7, 7, 7]
    assert expanded.take(torch.tensor([4, 0])).top_k.tolist() == [7, 3]
    assert expanded.greedy.tolist() == [False] * 5


def test_flags():
    plain = SamplingRows.build([1.0], [-1], [1.0], [0.0])
    assert (plain.has_greedy, plain.has_sampled) == (False, True)
    assert (plain.has_rank_filter, plain.has_min_p) == (False, False)
    greedy = SamplingRows.build([0.0], [-1], [0.5], [0.5])
    assert (greedy.has_greedy, greedy.has_sampled) == (True, False)
    assert (greedy.has_rank_filter, greedy.has_min_p) == (False, False)


def test_empty_batch():
    rows = SamplingRows.build([], [], [], [])
    assert target_probs(torch.zeros(0, 9), rows).shape == (0, 9)


@pytest.mark.parametrize(
    ("values", "name"),
    [
        (([-1.0], [-1], [1.0], [0.0]), "temperature"),
        (([float("nan")], [-1], [1.0], [0.0]), "temperature"),
        (([1.0], [0], [1.0], [0.0]), "top_k"),
        (([1.0], [-1], [1.5], [0.0]), "top_p"),
        (([1.0], [-1], [1.0], [-0.1]), "min_p"),
    ],
)
def test_bad_values_are_named(values, name):
    with pytest.raises(ValueError, match=name):
        SamplingRows.build(*values)


def test_bad_shapes():
    with pytest.raises(ValueError, match="one shape"):
        SamplingRows.build([1.0, 1.0], [-1], [1.0], [0.0])
    with pytest.raises(ValueError, match="do not fit"):
        target_probs(torch.zeros(2, 4), SamplingRows.build([1.0], [-1], [1.0], [0.0]))
