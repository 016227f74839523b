"""What draft rows read, against a brute-force set computation."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aspire_sglang.context import PageLists, PageSelection, SelectionConfig, select_pages


def brute_force(listed, built_for, position, config):
    """Positions a query may read; ``listed`` is None for a slot without a list."""
    size = config.page_size
    num_pages = position // size + 1
    budget = config.budget_pages(num_pages)
    if num_pages <= budget:
        pages = set(range(num_pages))
    elif listed is None:
        pages = set(range(config.sink_pages))
        pages |= set(range(num_pages - (budget - config.sink_pages), num_pages))
    else:
        pages = set(listed)
        pages |= set(range(num_pages - config.last_pages, num_pages))
        pages |= set(range(built_for // size, num_pages))
    tokens = {page * size + t for page in pages if page >= 0 for t in range(size)}
    return sorted(t for t in tokens if t <= position)


def read(lists, slots, positions):
    result, lens = lists.draft_positions(torch.tensor(slots), torch.tensor(positions))
    assert (result[torch.arange(result.shape[1]) >= lens.view(-1, 1)] == 0).all()
    return [row[:n] for row, n in zip(result.tolist(), lens.tolist(), strict=True)]


configs = st.builds(
    lambda size, sink, last, spare, ratio: SelectionConfig(
        size, sink + last + spare, ratio, sink, last
    ),
    st.sampled_from([1, 4, 16]),
    st.integers(0, 2),
    st.integers(1, 4),
    st.integers(0, 4),
    st.sampled_from([0.0, 0.07, 0.3, 1.0]),
)


@settings(max_examples=80, deadline=None)
@given(
    config=configs,
    lens=st.lists(st.integers(1, 500), min_size=1, max_size=6),
    growth=st.lists(st.integers(-3, 40), min_size=1, max_size=12),
    seed=st.integers(0, 1000),
)
def test_equals_brute_force_while_the_context_grows(config, lens, growth, seed):
    n = len(lens)
    generator = torch.Generator().manual_seed(seed)
    width = config.num_pages(max(lens))
    selection = select_pages(torch.rand(n, width, generator=generator), torch.tensor(lens), config)
    lists = PageLists(n + 3, max(width, config.sink_pages + config.last_pages), config)
    slots = torch.randperm(n + 3, generator=generator)[:n]
    listed = torch.rand(n, generator=generator) > 0.25
    lists.set(
        slots[listed],
        PageSelection(
            selection.pages[listed], selection.counts[listed], selection.context_lens[listed]
        ),
    )
    assert lists.has(slots).tolist() == listed.tolist()
    # The first query may also stand inside the scored context: it was a token of it.
    positions = [max(0, length - 1) for length in lens]
    for step in growth:
        positions = [max(0, p + step) for p in positions]
        for i, row in enumerate(read(lists, slots.tolist(), positions)):
            pages = selection.pages[i, : selection.counts[i]].tolist() if listed[i] else None
            assert row == brute_force(pages, lens[i], positions[i], config)
            assert row[-1] == positions[i]


@settings(max_examples=30, deadline=None)
@given(
    length=st.integers(1, 400),
    growth=st.integers(0, 200),
    listed=st.booleans(),
    seed=st.integers(0, 100),
)
def test_budget_that_covers_the_context_reads_everything(length, growth, listed, seed):
    config = SelectionConfig(page_size=8, min_pages=80, ratio=0.1)
    lists = PageLists(1, 80, config)
    if listed:
        scores = torch.rand(1, 50, generator=torch.Generator().manual_seed(seed))
        lists.set(torch.tensor([0]), select_pages(scores, torch.tensor([length]), config))
    position = length - 1 + growth
    assert read(lists, [0], [position]) == [list(range(position + 1))]


def test_context_that_shrank_into_its_budget_reads_everything():
    config = SelectionConfig(page_size=4, min_pages=6, ratio=0.0, sink_pages=1, last_pages=1)
    lists = PageLists(1, 6, config)
    lists.set(torch.tensor([0]), select_pages(torch.rand(1, 8), torch.tensor([32]), config))
    assert read(lists, [0], [23]) == [list(range(24))]
    assert read(lists, [0], [22]) == [list(range(23))]


def small_lists():
    config = SelectionConfig(page_size=4, min_pages=4, ratio=0.0, sink_pages=1, last_pages=1)
    lists = PageLists(4, 6, config)
    scores = torch.zeros(1, 20)
    scores[0, [5, 9]] = 1.0
    lists.set(torch.tensor([2]), select_pages(scores, torch.tensor([80]), config))
    return lists


def test_draft_pages():
    lists = small_lists()
    pages, counts = lists.draft_pages(torch.tensor([2, 0, 2]), torch.tensor([79, 79, 90]))
    assert counts.tolist() == [4, 4, 7]
    assert pages.tolist() == [
        [0, 5, 9, 19, 0, 0, 0],
        [0, 17, 18, 19, 0, 0, 0],
        [0, 5, 9, 19, 20, 21, 22],
    ]


def test_clear_and_set_again():
    lists = small_lists()
    slots = torch.arange(4)
    assert lists.has(slots).tolist() == [False, False, True, False]
    for clear in (2, torch.tensor([2, 3]), [2], slice(None)):
        lists = small_lists()
        lists.clear(clear)
        assert not lists.has(slots).any()
        assert read(lists, [2], [79]) == [[0, 1, 2, 3, *range(68, 80)]]
    scores = torch.zeros(1, 20)
    scores[0, [3, 4]] = 1.0
    lists.set(torch.tensor([2]), select_pages(scores, torch.tensor([80]), lists.config))
    pages, _ = lists.draft_pages(torch.tensor([2]), torch.tensor([79]))
    assert pages.tolist() == [[0, 3, 4, 19]]


def test_given_width_pads():
    lists = small_lists()
    slots, positions = torch.tensor([2, 1]), torch.tensor([79, 5])
    pages, counts = lists.draft_pages(slots, positions, width=9)
    narrow, narrow_counts = lists.draft_pages(slots, positions)
    assert torch.equal(counts, narrow_counts)
    assert torch.equal(pages[:, : narrow.shape[1]], narrow)
    assert (pages[:, narrow.shape[1] :] == 0).all()


def test_empty_batch():
    positions, lens = small_lists().draft_positions(
        torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64)
    )
    assert positions.shape == (0, 0)
    assert lens.shape == (0,)


def test_bad_inputs():
    config = SelectionConfig()
    with pytest.raises(ValueError, match="max_pages"):
        PageLists(2, 8, config)
    lists = PageLists(2, 20, config)
    selection = select_pages(torch.rand(1, 64), torch.tensor([1000]), config)
    with pytest.raises(ValueError, match="do not fit"):
        lists.set(torch.tensor([0]), selection)
    lists = PageLists(2, 32, config)
    with pytest.raises(ValueError, match="2 slots"):
        lists.set(torch.tensor([0, 1]), selection)
