"""Page scores and page choice against brute force."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aspire_sglang.context import SelectionConfig, select_pages, token_scores_to_page_scores


def brute_force(scores, context_len, config):
    num_pages = math.ceil(context_len / config.page_size)
    budget = min(config.budget_pages(num_pages), num_pages)
    forced = {p for p in range(num_pages) if p < config.sink_pages}
    forced |= {p for p in range(num_pages) if p >= num_pages - config.last_pages}
    rest = sorted((p for p in range(num_pages) if p not in forced), key=lambda p: -scores[p])
    return sorted(forced | set(rest[: budget - len(forced)]))


@settings(max_examples=150, deadline=None)
@given(
    page_size=st.sampled_from([1, 4, 16]),
    sink=st.integers(0, 3),
    last=st.integers(1, 5),
    spare=st.integers(0, 6),
    ratio=st.sampled_from([0.0, 0.07, 0.25, 1.0]),
    lens=st.lists(st.integers(0, 900), min_size=1, max_size=5),
    seed=st.integers(0, 1000),
)
def test_equals_brute_force(page_size, sink, last, spare, ratio, lens, seed):
    config = SelectionConfig(page_size, sink + last + spare, ratio, sink, last)
    width = max(1, math.ceil(max(lens) / page_size)) + seed % 3
    generator = torch.Generator().manual_seed(seed)
    scores = torch.stack([torch.randperm(width, generator=generator) for _ in lens]).float()
    result = select_pages(scores, torch.tensor(lens), config)
    for i, length in enumerate(lens):
        count = int(result.counts[i])
        assert result.pages[i, :count].tolist() == brute_force(scores[i].tolist(), length, config)
        assert (result.pages[i, count:] == -1).all()
    assert result.context_lens.tolist() == lens


def test_budget_covers_context():
    config = SelectionConfig(page_size=16, min_pages=32)
    result = select_pages(torch.rand(2, 40), torch.tensor([32 * 16, 100]), config)
    assert result.pages[0].tolist() == list(range(32))
    assert result.pages[1, :7].tolist() == list(range(7))
    assert result.counts.tolist() == [32, 7]


def test_worthless_and_broken_scores_still_fill_the_budget():
    config = SelectionConfig(page_size=1, min_pages=5, ratio=0.0, sink_pages=1, last_pages=1)
    scores = torch.zeros(4, 20)
    scores[1] = -torch.inf
    scores[2] = torch.nan
    scores[3] = torch.inf
    result = select_pages(scores, torch.full((4,), 12), config)
    assert result.counts.tolist() == [5] * 4
    assert ((result.pages >= 0) & (result.pages < 12)).all()
    assert all(len(set(row)) == 5 and {0, 11} <= set(row) for row in result.pages.tolist())


def test_budget():
    config = SelectionConfig()
    assert config.budget_pages(10) == 32
    assert config.budget_pages(457) == 32
    assert config.budget_pages(458) == 33
    # 0.07 * 1100 is 77.00000000000001 in floating point.
    assert config.budget_pages(1100) == 77
    pages = torch.arange(0, 5000)
    assert config.budgets(pages).tolist() == [config.budget_pages(p) for p in range(5000)]


def test_page_scores():
    probs = torch.tensor([[0.1, 0.5, 0.2, 0.2, 0.0], [0.3, 0.1, 0.1, 0.1, 0.4]])
    expected = {
        "max": [0.8, 0.4, 0.4],
        "sum": [1.0, 0.6, 0.4],
        "mean": [0.5, 0.3, 0.2],
    }
    for reduction, values in expected.items():
        scores = token_scores_to_page_scores(probs, 2, reduction)
        torch.testing.assert_close(scores, torch.tensor(values))
    batch = token_scores_to_page_scores(probs.expand(3, 4, 2, 5).half(), 2)
    assert batch.shape == (3, 4, 3)
    assert batch.dtype == torch.float32
    whole = token_scores_to_page_scores(probs[:, :4], 2)
    torch.testing.assert_close(whole, torch.tensor([0.8, 0.4]))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"page_size": 0}, "page_size"),
        ({"sink_pages": -1}, "sink_pages"),
        ({"last_pages": 0}, "its own page"),
        ({"min_pages": 8}, "min_pages"),
        ({"ratio": 1.5}, "ratio"),
        ({"ratio": float("nan")}, "ratio"),
        ({"reduction": "median"}, "reduction"),
    ],
)
def test_bad_configurations_are_named(values, message):
    with pytest.raises(ValueError, match=message):
        SelectionConfig(**values)


def test_bad_inputs():
    with pytest.raises(ValueError, match=r"\[n, P\]"):
        select_pages(torch.zeros(2, 4), torch.zeros(3), SelectionConfig())
    with pytest.raises(ValueError, match="reduction"):
        token_scores_to_page_scores(torch.zeros(2, 4), 2, "median")  # type: ignore[arg-type]
