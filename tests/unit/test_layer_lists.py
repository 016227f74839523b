"""Lists per layer, against a brute-force set computation, and the CPU kernel against both."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aspire_sglang.attention.cpu_lists import draft_slots
from aspire_sglang.context import SelectionConfig
from aspire_sglang.context.layer_lists import LayerLists

LAYERS, WIDTH = 3, 700


def brute_force(config, share, own_scores, ranked_scores, own_len, ranked_len, position):
    """Pages of one layer; scores are None for a slot without a list."""
    size = config.page_size
    num_pages = position // size + 1
    budget = config.budget_pages(num_pages)
    if num_pages <= budget:
        return list(range(num_pages))
    if ranked_scores is None:
        window = num_pages - (budget - config.sink_pages)
        return [*range(config.sink_pages), *range(window, num_pages)]
    tail = max(0, min(num_pages - config.last_pages, ranked_len // size))

    def best(scores, length):
        pages = config.num_pages(length)
        inner = range(config.sink_pages, max(config.sink_pages, pages - config.last_pages))
        order = sorted(inner, key=lambda page: -scores[page])
        outer = [p for p in range(pages) if p not in inner]
        return outer, order, min(config.budget_pages(pages), pages)

    outer, order, total = best(ranked_scores, ranked_len)
    ranked = outer + order[: total - len(outer)]
    room = min(max(total - sum(p >= tail for p in ranked), config.sink_pages), tail)
    if share == 1.0:
        ranked = outer[: config.sink_pages + config.last_pages]
        room = min(max(total - sum(p >= tail for p in ranked), config.sink_pages), tail)
    _, own_order, own_budget = best(own_scores, own_len)
    wanted = round(share * max(own_budget - config.sink_pages - config.last_pages, 0))
    chosen = set(range(min(config.sink_pages, tail)))
    for page in [*own_order[:wanted], *ranked, *range(tail - 1, -1, -1)]:
        if len(chosen) < room and page < tail:
            chosen.add(page)
    return sorted(chosen) + list(range(tail, num_pages))


configs = st.builds(
    lambda size, sink, last, spare, ratio: SelectionConfig(
        size, sink + last + spare, ratio, sink, last
    ),
    st.sampled_from([1, 4, 16]),
    st.integers(0, 2),
    st.integers(1, 4),
    st.integers(0, 6),
    st.sampled_from([0.0, 0.07, 0.3]),
)


@settings(max_examples=120, deadline=None)
@given(
    config=configs,
    share=st.sampled_from([0.25, 0.5, 1.0]),
    lens=st.lists(st.integers(1, 500), min_size=1, max_size=4),
    newer=st.integers(-5, 20),
    growth=st.lists(st.integers(-3, 30), min_size=1, max_size=5),
    seed=st.integers(0, 1000),
)
def test_equals_brute_force_while_the_context_grows(config, share, lens, newer, growth, seed):
    generator = torch.Generator().manual_seed(seed)
    n = len(lens)
    lists = LayerLists(n + 2, LAYERS, config.budget_pages(config.num_pages(600)), config, share)
    slots = torch.randperm(n + 2, generator=generator)[:n]
    # Lists are made for contexts that their budget does not cover.
    listed = torch.tensor([config.budget_pages(p := config.num_pages(x)) < p for x in lens])
    own = torch.rand(n, LAYERS, config.num_pages(max(lens)), generator=generator)
    ages = [max(1, length + newer) for length in lens]
    ranked = torch.rand(n, config.num_pages(max(ages)), generator=generator)
    some = listed.nonzero().flatten()
    # Verifies rank first; a draft's vote replaces the ranking and leaves own pages alone.
    lists.set_ranked(slots[some], own[some, 0], torch.tensor(lens)[some])
    lists.set_own(slots[some], own[some].clone(), torch.tensor(lens)[some])
    if share < 1.0:
        lists.set_ranked(slots[some], ranked[some], torch.tensor(ages)[some])
    else:
        ranked, ages = own[:, 0], lens
    assert lists.has(slots).tolist() == listed.tolist()
    table = torch.randperm((n + 2) * WIDTH, generator=generator).view(n + 2, WIDTH).int()
    positions = [max(0, age - 1) for age in ages]
    for step in growth:
        positions = [min(max(0, p + step), WIDTH - 1) for p in positions]
        pages, counts = lists.draft_pages(slots, torch.tensor(positions))
        kernel = draft_slots(lists, slots.tolist(), positions, table)
        for i, position in enumerate(positions):
            for layer in range(LAYERS):
                expected = brute_force(
                    config,
                    share,
                    own[i, layer].tolist(),
                    ranked[i].tolist() if listed[i] else None,
                    lens[i],
                    ages[i],
                    position,
                )
                assert pages[i, layer, : counts[i]].tolist() == expected
                tokens = [
                    p * config.page_size + t for p in expected for t in range(config.page_size)
                ]
                read = [t for t in tokens if t <= position]
                assert kernel[i][layer].tolist() == table[slots[i]][read].tolist()


def small(share):
    config = SelectionConfig(page_size=1, min_pages=8, ratio=0.0, sink_pages=1, last_pages=3)
    lists = LayerLists(2, 2, 8, config, share)
    own = torch.zeros(1, 2, 40)
    own[0, 0, [10, 11, 12, 13]] = torch.tensor([4.0, 3.0, 2.0, 1.0])
    own[0, 1, [20, 21, 22, 23]] = torch.tensor([4.0, 3.0, 2.0, 1.0])
    shared = torch.zeros(1, 40)
    shared[0, [11, 30, 31, 32]] = torch.tensor([4.0, 3.0, 2.0, 1.0])
    slot, length = torch.tensor([1]), torch.tensor([40])
    lists.set_ranked(slot, shared, length)
    lists.set_own(slot, own, length)
    return lists


def test_a_page_in_both_lists_makes_room_for_another_one():
    pages, counts = small(0.5).draft_pages(torch.tensor([1]), torch.tensor([39]))
    assert counts.tolist() == [8]
    assert pages[0].tolist() == [[0, 10, 11, 30, 31, 37, 38, 39], [0, 11, 20, 21, 30, 37, 38, 39]]


def test_without_a_shared_part_a_layer_reads_its_own_pages():
    pages, _ = small(1.0).draft_pages(torch.tensor([1]), torch.tensor([39]))
    assert pages[0].tolist() == [[0, 10, 11, 12, 13, 37, 38, 39], [0, 20, 21, 22, 23, 37, 38, 39]]


def test_a_cleared_slot_reads_a_window():
    lists = small(0.5)
    lists.clear([1])
    pages, _ = lists.draft_pages(torch.tensor([1]), torch.tensor([39]))
    assert pages[0].tolist() == [[0, 33, 34, 35, 36, 37, 38, 39]] * 2
    assert not lists.has(torch.tensor([1])).any()


def test_impossible_sizes_are_refused():
    config = SelectionConfig(min_pages=9)
    with pytest.raises(ValueError, match="own_share"):
        LayerLists(1, 1, 32, config, 0.0)
    with pytest.raises(ValueError, match="max_pages"):
        LayerLists(1, 1, 8, config, 0.5)
    lists = LayerLists(1, 1, 32, config, 0.5)
    with pytest.raises(ValueError, match="position 9 in a table of 9"):
        draft_slots(lists, [0], [9], torch.zeros(1, 9, dtype=torch.int32))
