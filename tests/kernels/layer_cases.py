"""Random inputs for the kernels of lists per layer, and the comparisons that every device is put
to."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from aspire_sglang.context.layer_lists import LayerLists
from aspire_sglang.kernels import layer_selection, layer_tables, reference
from tests.kernels.cases import ListShape, scores_of


@dataclass(frozen=True)
class LayerShape(ListShape):
    """Sizes of one case of lists per layer."""

    min_pages: int = 8
    own_share: float = 0.5
    num_lists: int = 3


LAYER_SHAPES = {
    "short and long": LayerShape((1, 16, 17, 127, 128, 129, 700, 0, 1500)),
    "own pages only": LayerShape((700, 0, 333, 90, 5), own_share=1.0),
    "few own pages": LayerShape((700, 333), own_share=0.1),
    "one list": LayerShape((700, 150), num_lists=1),
    "one page": LayerShape((3,)),
    "no sink": LayerShape((500, 40), sink=0, last=1, min_pages=4),
    "no room for own pages": LayerShape((500, 40), min_pages=3, ratio=0.0),
    "ratio only": LayerShape((1600, 1617), ratio=0.3),
    "everything": LayerShape((333, 0), ratio=1.0),
    "page 8": LayerShape((333, 9, 900), page_size=8, sink=2, last=4, min_pages=24),
    "KV page 16": LayerShape((1, 16, 700, 333, 0), kv_page_size=16),
    "page 64, KV page 16": LayerShape((64, 65, 2000, 0), page_size=64, kv_page_size=16),
    "token pages": LayerShape((170, 41, 990), page_size=1, sink=3, last=8, min_pages=40),
    "long lists of token pages": LayerShape(
        (1200, 1025, 3, 0), page_size=1, min_pages=540, num_lists=2
    ),
    "three quarters": LayerShape((333, 700), own_share=0.75, min_pages=9),
}


@dataclass(frozen=True)
class Inputs:
    """Inputs of one case; ``width``: pages of a score row."""

    lens: Tensor
    slots: Tensor
    lists: LayerLists
    req_to_token: Tensor
    width: int

    def scratch(self) -> Tensor:
        size = layer_selection.scratch_size(self.lists, len(self.slots))
        return torch.full((size,), -77, dtype=torch.int32, device=self.slots.device)


def inputs_of(shape: LayerShape, device: str, growth: int = 0) -> Inputs:
    """Empty lists on shuffled slots; contexts may grow by ``growth`` tokens."""
    rng = torch.Generator().manual_seed(1)
    config = shape.config
    rows, longest = len(shape.lens), max(*shape.lens, 1)
    width = config.num_pages(longest) + 1
    num_slots = rows + 3
    lens = torch.tensor(shape.lens)
    order = torch.randperm(num_slots, generator=rng)[:rows]
    kv_pages = math.ceil((longest + max(growth, 0) + 1) / shape.kv_page_size)
    pages = torch.randperm(num_slots * kv_pages, generator=rng).view(num_slots, kv_pages, 1)
    tokens = pages * shape.kv_page_size + torch.arange(shape.kv_page_size)
    return Inputs(
        lens=lens.to(device),
        slots=torch.where(lens > 0, order, -1).to(device, torch.int32),
        lists=LayerLists(
            num_slots,
            shape.num_lists,
            max(config.budget_pages(width), shape.sink + shape.last),
            config,
            shape.own_share,
            device,
        ),
        req_to_token=tokens.flatten(1).to(device, torch.int32).contiguous(),
        width=width,
    )


def layer_scores(kind: str, case: Inputs, device: str) -> Tensor:
    """``[num_lists, n, P]``"""
    parts = [
        scores_of(kind, len(case.slots), case.width, device, seed)
        for seed in range(case.lists.num_lists)
    ]
    return torch.stack(parts)


def same_selection(got: LayerLists, want: LayerLists, *, any_order: int = 0) -> None:
    """Up to the counts; ``any_order``: first shared pages whose order does not count."""
    for name in ("own_counts", "ranked_counts", "totals", "built_for"):
        assert getattr(got, name).tolist() == getattr(want, name).tolist(), name
    for slot, (own, shared) in enumerate(
        zip(want.own_counts.tolist(), want.ranked_counts.tolist(), strict=True)
    ):
        assert got.own[slot, :, :own].tolist() == want.own[slot, :, :own].tolist(), slot
        ours, theirs = (lists.ranked[slot, :shared].tolist() for lists in (got, want))
        assert sorted(ours[:any_order]) == sorted(theirs[:any_order]), slot
        assert ours[any_order:] == theirs[any_order:], slot


def check_selection(shape: LayerShape, kind: str, device: str) -> None:
    case = inputs_of(shape, device)
    scores = layer_scores(kind, case, device)
    want = copy.deepcopy(case.lists)
    given = scores.clone()
    layer_selection.select_shared(scores[0], case.lens, case.slots, case.lists, case.scratch())
    layer_selection.select_own(scores, case.lens, case.slots, case.lists, case.scratch())
    torch.testing.assert_close(scores, given, rtol=0, atol=0, equal_nan=True)
    reference.select_shared(scores[0], case.lens, case.slots, want)
    reference.select_own(scores, case.lens, case.slots, want)
    same_selection(case.lists, want)


def check_selection_equals_the_definition(shape: LayerShape, device: str) -> None:
    case = inputs_of(shape, device)
    scores = layer_scores("random", case, device)
    want = copy.deepcopy(case.lists)
    layer_selection.select_shared(scores[0], case.lens, case.slots, case.lists, case.scratch())
    layer_selection.select_own(scores, case.lens, case.slots, case.lists, case.scratch())
    real = case.slots >= 0
    slots = case.slots[real].long()
    want.set_ranked(slots, scores[0][real], case.lens[real])
    want.set_own(slots, scores[:, real].transpose(0, 1).clone(), case.lens[real])
    same_selection(case.lists, want, any_order=shape.sink + shape.last)


def set_lists(case: Inputs, newer: int, device: str) -> None:
    """Lists by the definition: own pages of an older context than the shared ones."""
    scores = layer_scores("random", case, device)
    real = case.slots >= 0
    slots, lens = case.slots[real].long(), case.lens[real]
    case.lists.set_own(slots, scores[:, real].transpose(0, 1).clone(), lens)
    ranked = scores_of("random", len(case.slots), case.width, device, seed=99)[real]
    case.lists.set_ranked(slots, ranked, (lens + newer).clamp(min=1))


def check_tables(
    shape: LayerShape,
    device: str,
    growth: int,
    listed: bool,
    draft_lists: range | None = None,
    full_rows: bool = True,
) -> None:
    """Rows take turns to draft and verify; contexts have grown or shrunk since the lists were
    made."""
    case = inputs_of(shape, device, growth)
    if listed:
        set_lists(case, min(growth, 0) // 2, device)
    lens = torch.where(case.lens > 0, (case.lens + growth).clamp(min=1), 0)
    rows = len(shape.lens)
    draft = torch.arange(rows, device=device) % 3 != 0
    wanted = range(shape.num_lists) if draft_lists is None else draft_lists
    columns = math.ceil(case.req_to_token.shape[1] / shape.kv_page_size)
    poison = {"dtype": torch.int32, "device": device}
    for mode in (draft, ~draft, torch.ones_like(draft)):
        tables = torch.full((shape.num_lists, rows, columns), -77, **poison)
        seqlens = torch.full((rows,), -77, **poison)
        layer_tables.build_layer_tables(
            case.req_to_token, case.slots, lens, mode, case.lists, tables, seqlens,
            kv_page_size=shape.kv_page_size, draft_lists=draft_lists, full_rows=full_rows,
        )  # fmt: skip
        for row, slot in enumerate(case.slots.tolist()):
            found = tables[:, row].tolist()
            length, seqlen = int(lens[row]), int(seqlens[row])
            if slot < 0 or not mode[row]:
                assert seqlen == (-77 if not full_rows else length)
                count = math.ceil(max(seqlen, 0) / shape.kv_page_size)
                whole = case.req_to_token[slot, : length : shape.kv_page_size] if count else []
                whole = [int(place) // shape.kv_page_size for place in whole]
                for part in found:
                    assert part == whole + [-77] * (columns - count)
                continue
            pages, counts = case.lists.draft_pages(
                torch.tensor([slot], device=device), torch.tensor([length - 1], device=device)
            )
            pages = pages[0, :, : int(counts[0])].tolist()
            for number, part in enumerate(found):
                if number not in wanted:
                    assert part == [-77] * columns
                    continue
                _check_draft_row(case, shape, slot, length, seqlen, part, pages[number])
            if not wanted:
                assert seqlen == -77


def _check_draft_row(
    case: Inputs,
    shape: LayerShape,
    slot: int,
    length: int,
    seqlen: int,
    found: list[int],
    pages: list[int],
) -> None:
    size, kv = shape.page_size, shape.kv_page_size
    beyond = shape.config.num_pages(length) * size - length
    assert seqlen == len(pages) * size - beyond
    count = math.ceil(seqlen / kv)
    assert found[count:] == [-77] * (len(found) - count)
    position_of = {
        int(place) // kv: n * kv for n, place in enumerate(case.req_to_token[slot, ::kv])
    }
    read = [position_of[place] for place in found[:count]]
    per_page = size // kv
    # Whole pages, the query's own last and perhaps partial.
    first = read[::per_page]
    assert read == [at + n * kv for at in first for n in range(per_page)][:count]
    assert first[-1] == pages[-1] * size
    assert sorted(at // size for at in first) == pages
    assert not any(at % size for at in first)
