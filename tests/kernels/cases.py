"""Random inputs for the kernels, and the comparisons that every device is put to."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from aspire_sglang.context import PageLists, SelectionConfig
from aspire_sglang.kernels import (
    greedy_accept,
    page_lse,
    page_scores,
    page_selection,
    page_tables,
    reference,
    refresh_tables,
    sample_tokens,
)
from aspire_sglang.kernels.vote_rows import KeyScan, VoteRows

POISON = 7.5e33
"""A float that no kernel computes: what must not be written still holds it afterwards."""


@dataclass(frozen=True)
class VoteShape:
    """Sizes of one scoring case.

    ``lens`` are context lengths, 0 for a padding row. Every second row has two voters, ``k``
    queries apart.
    """

    lens: tuple[int, ...]
    kv_heads: int = 2
    group: int = 3
    dim: int = 64
    page_size: int = 16
    k: int = 4
    cap: float = 0.0
    padded_pool: bool = False


VOTE_SHAPES = {
    "group 3, odd lengths": VoteShape((1, 16, 17, 333, 0, 130)),
    "group 1": VoteShape((5, 128, 129), kv_heads=3, group=1),
    "group 4, dim 128": VoteShape((257, 0, 31), group=4, dim=128),
    "group 8, page 8": VoteShape((40, 7), kv_heads=1, group=8, page_size=8),
    "page 32, capped": VoteShape((100, 290), page_size=32, cap=2.0),
    "page 64": VoteShape((64, 65, 200), page_size=64, dim=128, kv_heads=1, group=4),
    "token pages": VoteShape((33, 130), page_size=1, kv_heads=1),
    "only padding": VoteShape((0, 0)),
    "strided pool": VoteShape((90, 150), padded_pool=True),
}


@dataclass(frozen=True)
class Votes:
    """Inputs of one scoring case."""

    q: Tensor
    k: Tensor
    req_to_token: Tensor
    rows: VoteRows
    scale: float
    max_pages: int


def votes(shape: VoteShape, dtype: torch.dtype, device: str, seed: int = 0) -> Votes:
    """Random queries and keys, with a few strong matches, on shuffled slots."""
    rng = torch.Generator().manual_seed(seed)
    longest = max(*shape.lens, 1)
    requests = len(shape.lens) + 2
    num_slots = requests * longest + 5
    width = 2 * shape.dim if shape.padded_pool else shape.dim
    k = torch.randn(num_slots, shape.kv_heads, width, generator=rng)[..., : shape.dim]
    table = torch.randperm(num_slots, generator=rng)[: requests * longest]
    slots, voters, positions = [], [], []
    for row, length in enumerate(shape.lens):
        slots.append(row + 1 if length else -1)
        queries = min(shape.k + 1, length) if row % 2 else 1
        first = len(positions)
        pair = [first, first + queries - 1 if queries > 1 else -1]
        # Voters may come in any order.
        voters.append(pair if row % 4 < 3 else pair[::-1])
        positions += range(max(length - queries, 0), max(length - queries, 0) + queries)
    q = torch.randn(len(positions), shape.kv_heads * shape.group, shape.dim, generator=rng) * 2
    k, q = k.to(device, dtype), q.to(device, dtype)
    if shape.padded_pool:
        wide = torch.zeros(num_slots, shape.kv_heads, width, dtype=dtype, device=device)
        wide[..., : shape.dim] = k
        k = wide[..., : shape.dim]
    return Votes(
        q=q,
        k=k,
        req_to_token=table.view(requests, longest).to(device, torch.int32),
        rows=VoteRows(
            torch.tensor(slots, dtype=torch.int32, device=device),
            torch.tensor(voters, dtype=torch.int32, device=device),
            torch.tensor(positions, dtype=torch.int64, device=device),
        ),
        scale=shape.dim**-0.5,
        max_pages=math.ceil(longest / shape.page_size) + 2,
    )


def check_page_scores(
    shape: VoteShape, dtype: torch.dtype, device: str, reduction: str, scan: KeyScan | None = None
) -> None:
    case = votes(shape, dtype, device)
    lse = reference.query_lse(case.q, case.k, case.req_to_token, case.rows, case.scale, shape.cap)
    # As FA3 returns it: heads first.
    lse = lse.T.contiguous().T
    options = {"page_size": shape.page_size, "scale": case.scale, "logit_cap": shape.cap}
    inputs = (case.q, lse, case.k, case.req_to_token, case.rows)
    got, want = (
        torch.full((len(shape.lens), case.max_pages), POISON, device=device) for _ in range(2)
    )
    page_scores.page_scores(*inputs, got, reduction=reduction, scan=scan, **options)
    reference.page_scores(*inputs, want, reduction=reduction, **options)
    torch.testing.assert_close(got, want, rtol=2e-4, atol=2e-6)


def check_page_lse(
    shape: VoteShape, dtype: torch.dtype, device: str, per_head: bool, normalized: bool
) -> None:
    case = votes(shape, dtype, device)
    lse = None
    if normalized:
        lse = reference.query_lse(
            case.q, case.k, case.req_to_token, case.rows, case.scale, shape.cap
        )
    heads = case.q.shape[1] if per_head else case.k.shape[1]
    options = {"page_size": shape.page_size, "scale": case.scale, "logit_cap": shape.cap}
    got, want = (
        torch.full((len(shape.lens), 2, heads, case.max_pages), POISON, device=device)
        for _ in range(2)
    )
    page_lse.page_lse(case.q, case.k, case.req_to_token, case.rows, got, lse=lse, **options)
    reference.page_lse(case.q, case.k, case.req_to_token, case.rows, want, lse=lse, **options)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-4)


@dataclass(frozen=True)
class ListShape:
    """Sizes of one selection case; ``lens`` are context lengths, 0 for a padding row."""

    lens: tuple[int, ...]
    page_size: int = 16
    min_pages: int = 6
    ratio: float = 0.07
    sink: int = 1
    last: int = 2
    kv_page_size: int = 1

    @property
    def config(self) -> SelectionConfig:
        return SelectionConfig(self.page_size, self.min_pages, self.ratio, self.sink, self.last)


LIST_SHAPES = {
    "short and long": ListShape((1, 16, 17, 95, 96, 97, 700, 0, 3000)),
    "one page": ListShape((3,)),
    "no sink": ListShape((500, 40), sink=0, last=1, min_pages=1),
    "ratio only": ListShape((1600, 1617), ratio=0.3),
    "everything": ListShape((333, 0), ratio=1.0),
    "page 8": ListShape((333, 9), page_size=8),
    "KV page 16": ListShape((1, 16, 700, 333, 0), kv_page_size=16),
    "KV page 16, lists of 32": ListShape((31, 700, 333), page_size=32, kv_page_size=16),
    "KV page 64": ListShape((64, 65, 2000, 0), page_size=64, kv_page_size=64),
    "token pages": ListShape((70, 41), page_size=1),
    "wide rows": ListShape((5000, 1024, 1025, 4096, 3, 0), page_size=1, ratio=0.01),
}

SCORES = ("random", "ties", "equal", "broken", "negative")


def scores_of(kind: str, rows: int, width: int, device: str, seed: int = 0) -> Tensor:
    """``[rows, width]`` float32 scores, with garbage where a kernel must not look."""
    rng = torch.Generator().manual_seed(seed)
    scores = torch.rand(rows, width, generator=rng)
    if kind == "ties":
        scores = (scores * 4).floor()
    elif kind == "equal":
        scores = torch.zeros(rows, width)
        scores[:, ::2] = -0.0
    elif kind == "negative":
        scores = torch.randn(rows, width, generator=rng) * 1e30
    elif kind == "broken":
        scores[scores < 0.3] = math.nan
        scores[scores > 0.9] = math.inf
        scores[(scores > 0.4) & (scores < 0.5)] = -math.inf
    return scores.to(device)


@dataclass(frozen=True)
class Lists:
    """Inputs of one selection or table case."""

    lens: Tensor
    slots: Tensor
    lists: PageLists
    req_to_token: Tensor
    width: int
    """Pages of a score row."""

    def outputs(self, kv_page_size: int) -> tuple[Tensor, Tensor]:
        """A poisoned table and poisoned lengths."""
        columns = math.ceil(self.req_to_token.shape[1] / kv_page_size)
        rows, device = self.slots.shape[0], self.slots.device
        table = torch.full((rows, columns), -77, dtype=torch.int32, device=device)
        return table, torch.full((rows,), -77, dtype=torch.int32, device=device)


def lists(shape: ListShape, device: str, growth: int = 0) -> Lists:
    """Empty lists on shuffled slots; contexts may grow by ``growth`` tokens."""
    rng = torch.Generator().manual_seed(1)
    config = shape.config
    n, longest = len(shape.lens), max(*shape.lens, 1)
    width = config.num_pages(longest) + 1
    num_slots = n + 3
    order = torch.randperm(num_slots, generator=rng)[:n]
    lens = torch.tensor(shape.lens)
    kv_pages = math.ceil((longest + growth + 1) / shape.kv_page_size)
    pages = torch.randperm(num_slots * kv_pages, generator=rng).view(num_slots, kv_pages)
    tokens = pages[..., None] * shape.kv_page_size + torch.arange(shape.kv_page_size)
    return Lists(
        lens=lens.to(device),
        slots=torch.where(lens > 0, order, -1).to(device, torch.int32),
        lists=PageLists(
            num_slots,
            max(min(config.budget_pages(width), width), shape.sink + shape.last) + 1,
            config,
            device,
        ),
        req_to_token=tokens.flatten(1).to(device, torch.int32).contiguous(),
        width=width,
    )


def assert_same_lists(got: PageLists, want: PageLists) -> None:
    for name in ("counts", "built_for", "pages"):
        torch.testing.assert_close(getattr(got, name), getattr(want, name), rtol=0, atol=0)


def check_select_pages(shape: ListShape, kind: str, device: str) -> None:
    case = lists(shape, device)
    scores = scores_of(kind, len(shape.lens), case.width, device)
    want = copy.deepcopy(case.lists)
    page_selection.select_pages(scores, case.lens, case.slots, case.lists)
    reference.select_pages(scores, case.lens, case.slots, want)
    assert_same_lists(case.lists, want)


def check_build_tables(shape: ListShape, device: str, growth: int, listed: bool) -> None:
    """Rows take turns to draft and verify; contexts have grown since the lists were made."""
    case = lists(shape, device, growth)
    if listed:
        scores = scores_of("random", len(shape.lens), case.width, device)
        reference.select_pages(scores, case.lens, case.slots, case.lists)
    lens = case.lens + growth
    draft = torch.arange(len(shape.lens), device=device) % 3 != 0
    for mode in (draft, ~draft, torch.zeros_like(draft)):
        got, want = case.outputs(shape.kv_page_size), case.outputs(shape.kv_page_size)
        inputs = (case.req_to_token, case.slots, lens, mode, case.lists)
        options = {"kv_page_size": shape.kv_page_size, "padding_len": 1}
        page_tables.build_tables(*inputs, *got, **options)
        reference.build_tables(*inputs, *want, **options)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)


def check_refresh_tables(shape: ListShape, device: str) -> None:
    case = lists(shape, device)
    scores = scores_of("random", len(shape.lens), case.width, device)
    draft = torch.arange(len(shape.lens), device=device) % 3 != 0
    want_lists = copy.deepcopy(case.lists)
    reference.select_pages(scores, case.lens, case.slots, want_lists)
    got, want = case.outputs(shape.kv_page_size), case.outputs(shape.kv_page_size)
    tables = {"kv_page_size": shape.kv_page_size}
    reference.build_tables(
        case.req_to_token, case.slots, case.lens, draft, want_lists, *want, **tables
    )
    for tensor, poison in zip(want, case.outputs(shape.kv_page_size), strict=True):
        untouched = ~draft | (case.slots < 0)
        tensor[untouched] = poison[untouched]
    refresh_tables.refresh_tables(
        scores, case.req_to_token, case.slots, case.lens, draft, case.lists, *got, **tables
    )
    assert_same_lists(case.lists, want_lists)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def check_accept_greedy(rows: int, depth: int, device: str, seed: int) -> None:
    """Random batches over a vocabulary of 2, so that runs of every length occur."""
    rng = torch.Generator().manual_seed(seed)
    requests = rows + 2
    pending = torch.randint(0, depth + 1, (requests,), generator=rng)
    slots = torch.randperm(requests, generator=rng)[:rows]
    slots[torch.rand(rows, generator=rng) < 0.2] = -1
    draft = torch.rand(rows, generator=rng) < 0.4
    lens = torch.where(draft, 1, pending[slots.clamp(min=0)] + 1) * (slots >= 0)
    qo_indptr = torch.nn.functional.pad(lens.cumsum(0), (1, 0))
    state = {
        "target_tokens": torch.randint(0, 2, (int(qo_indptr[-1]) + 3,), generator=rng),
        "qo_indptr": qo_indptr.int(),
        "slots": slots.int(),
        "draft": draft,
        "drafts": torch.randint(0, 2, (requests, depth), generator=rng),
        "pending": pending.int(),
        "bonus": torch.full((requests,), -5),
        "seq_lens": torch.randint(1, 9999, (rows,), generator=rng),
        "tokens": torch.full((rows, depth + 1), -5),
        "accept_len": torch.full((rows,), -5, dtype=torch.int32),
    }
    got = {name: tensor.to(device, copy=True) for name, tensor in state.items()}
    greedy_accept.accept_greedy(**got)
    reference.accept_greedy(**state)
    for name, tensor in state.items():
        torch.testing.assert_close(got[name].cpu(), tensor, rtol=0, atol=0, msg=name)


def check_sample_tokens(rows: int, vocab: int, dtype: torch.dtype, device: str, seed: int) -> None:
    """Random logits, greedy and sampled rows, padding tokens; near-ties may fall either way."""
    rng = torch.Generator().manual_seed(seed)
    logits = (3 * torch.randn((rows + 1, vocab), generator=rng)).to(dtype)
    token_row = torch.randint(0, rows, (rows + 1,), generator=rng).int()
    token_row[-1] = -1
    positions = torch.randint(0, 200_000, (rows + 1,), generator=rng)
    temperature = 0.3 + torch.rand(rows, generator=rng)
    temperature[::3] = 0.0
    halves = torch.randint(-(2**31), 2**31, (2, rows), generator=rng).int()
    tokens = torch.full((rows + 1,), -5, device=device)
    sample_tokens.sample_tokens(
        logits.to(device),
        token_row.to(device),
        positions.to(device),
        temperature.to(device),
        halves[0].to(device),
        halves[1].to(device),
        torch.empty(sample_tokens.partial_size(rows + 1), dtype=torch.int64, device=device),
        tokens,
    )
    low, high = (half.numpy().view(np.uint32) for half in halves)
    for token, row in enumerate(token_row.tolist()):
        if row < 0:
            assert tokens[token] == 0
            continue
        key = (int(high[row]) << 32) | int(low[row])
        scores = reference.sample_scores(
            logits[token], float(temperature[row]), key, int(positions[token])
        )
        assert scores[tokens[token].cpu()] >= scores.max() - 2e-5 * scores.max().abs()
