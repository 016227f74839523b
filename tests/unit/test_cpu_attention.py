"""CPU attention kernels against a dense float64 reference."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from aspire_sglang.attention import cpu_many, cpu_products, cpu_runs, cpu_single
from aspire_sglang.attention.cpu_kernels import (
    Geometry,
    Vote,
    full_attention,
    full_attention_with_scores,
    plan_full,
    plan_sparse,
    sparse_attention,
)

NUM_SLOTS = 2500
# float32 sums of up to a thousand terms of order one.
TOL32 = {"atol": 3e-6, "rtol": 3e-5}
# Values and probabilities are rounded to bfloat16 (2^-9 relative), the output once more per piece.
TOL16 = {"atol": 1.5e-2, "rtol": 2e-2}


def make_pool(kv_heads: int, dim: int, used: list[Tensor], dtype: torch.dtype, seed: int = 0):
    """A pool that is NaN everywhere but in the used slots."""
    gen = torch.Generator().manual_seed(seed)
    pools = []
    for _ in range(2):
        pool = torch.full((kv_heads, NUM_SLOTS, dim), float("nan"))
        for slots in used:
            pool[:, slots] = torch.randn(kv_heads, slots.numel(), dim, generator=gen)
        pools.append(pool.to(dtype))
    return pools[0], pools[1]


def make_slots(kind: str, length: int, taken: set[int], seed: int) -> Tensor:
    """Slots of one row that no other row has."""
    gen = torch.Generator().manual_seed(seed)
    free = torch.tensor(sorted(set(range(NUM_SLOTS)) - taken))
    if kind == "contiguous":
        slots = free[:length]
    elif kind == "scattered":
        slots = free[torch.randperm(free.numel(), generator=gen)[:length]]
    else:  # one long run, then every third slot, as decode tokens of a busy batch
        tail = min(length - 1, 37)
        slots = torch.cat([free[: length - tail], free[length + 5 :: 3][:tail]])
    assert slots.numel() == length
    taken.update(slots.tolist())
    return slots


def dense(q: Tensor, k: Tensor, v: Tensor, slots: Tensor, scale: float, cap: float = 0.0):
    """Reference of one row: output ``[Q, Hq, D]`` and probabilities ``[Q, Hq, L]``."""
    queries, heads, _ = q.shape
    group = heads // k.shape[0]
    keys = k[:, slots].double().repeat_interleave(group, 0)
    values = v[:, slots].double().repeat_interleave(group, 0)
    scores = torch.einsum("qhd,hld->qhl", q.double(), keys) * scale
    if cap:
        scores = cap * torch.tanh(scores / cap)
    length = slots.numel()
    position = torch.arange(length - queries, length).view(-1, 1, 1)
    scores = scores.masked_fill(torch.arange(length) > position, float("-inf"))
    probs = torch.softmax(scores, -1)
    return torch.einsum("qhl,hld->qhd", probs, values), probs


def run_full(
    rows: list[tuple[str, int, int]], group: int, dim: int, dtype=torch.float32, cap: float = 0.0
) -> None:
    kv_heads = 2
    taken: set[int] = set()
    slots = [make_slots(kind, length, taken, i) for i, (kind, length, _) in enumerate(rows)]
    k, v = make_pool(kv_heads, dim, slots, dtype)
    q_lens = [n for _, _, n in rows]
    gen = torch.Generator().manual_seed(1)
    q = (2 * torch.randn(sum(q_lens), kv_heads * group, dim, generator=gen)).to(dtype)
    geometry = Geometry(kv_heads * group, kv_heads, NUM_SLOTS)
    plan = plan_full(slots, q_lens, geometry, dtype)
    scale = 1 / math.sqrt(dim)
    votes = [Vote(i, (0, -1)) for i in range(len(rows))]
    out = full_attention(q, k, v, plan, scale, logit_cap=cap)
    again, pages = full_attention_with_scores(q, k, v, plan, scale, votes, logit_cap=cap)
    assert torch.equal(out, again)
    assert out.dtype == dtype
    start = 0
    for i, (_, length, queries) in enumerate(rows):
        part = q[start : start + queries]
        want, probs = dense(part, k, v, slots[i], scale, cap)
        tol = TOL32 if dtype == torch.float32 else TOL16
        torch.testing.assert_close(out[start : start + queries].double(), want, **tol)
        voting = sorted({0, queries - 1})
        tokens = probs[voting].amax(1).mean(0)
        expect = torch.stack([chunk.sum() for chunk in tokens.split(16)])
        assert pages[i].shape == (math.ceil(length / 16),)
        torch.testing.assert_close(pages[i].double(), expect, atol=1e-6, rtol=1e-4)
        start += queries


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("group", [1, 2, 3, 4, 8])
def test_mixed_rows(group: int, dim: int) -> None:
    rows = [
        ("busy", 611, 1),
        ("contiguous", 300, 5),
        ("scattered", 77, 1),
        ("busy", 431, 17),
        ("contiguous", 1, 1),
        ("scattered", 9, 9),
    ]
    run_full(rows, group, dim)


@pytest.mark.parametrize("queries", range(1, 18))
@pytest.mark.parametrize("kind", ["contiguous", "scattered", "busy"])
def test_query_lengths(kind: str, queries: int) -> None:
    run_full([(kind, 523, queries), (kind, queries, queries)], 3, 64)


def test_bfloat16() -> None:
    rows = [("busy", 611, 1), ("contiguous", 300, 5), ("scattered", 77, 1), ("busy", 431, 17)]
    run_full(rows, 3, 64, torch.bfloat16)


def test_logit_cap() -> None:
    run_full([("busy", 400, 1), ("busy", 400, 6)], 2, 64, cap=3.0)


@pytest.mark.parametrize("kind", ["contiguous", "scattered", "busy"])
@pytest.mark.parametrize(("length", "queries"), [(300, 300), (1500, 290), (513, 129), (601, 48)])
@pytest.mark.parametrize("cap", [0.0, 4.0])
def test_prefill_chunks(kind: str, length: int, queries: int, cap: float) -> None:
    run_full([(kind, length, queries)], 3, 64, cap=cap)


@pytest.mark.parametrize("budget", [900, 1 << 22])
def test_without_flash(monkeypatch: pytest.MonkeyPatch, budget: int) -> None:
    monkeypatch.setattr(cpu_many, "flash_available", lambda: False)
    monkeypatch.setattr(cpu_products, "SCORE_BUDGET", budget)
    run_full([("busy", 700, 290), ("busy", 700, 60), ("contiguous", 600, 9)], 3, 64)


def test_prefill_bfloat16() -> None:
    run_full([("busy", 700, 290)], 3, 64, torch.bfloat16)


@pytest.mark.parametrize("folded", [1, 64])
@pytest.mark.parametrize("split", [16, 512])
def test_pieces(monkeypatch: pytest.MonkeyPatch, split: int, folded: int) -> None:
    """However keys are divided over views, splits and gathers, the result is the same."""
    monkeypatch.setattr(cpu_many, "MAX_FOLDED_TOKENS", folded)
    monkeypatch.setattr(cpu_many, "MIN_SPLIT", split)
    monkeypatch.setattr(cpu_runs, "MIN_VIEW", 64)
    rows = [("busy", 1000, 5), ("contiguous", 700, 5), ("scattered", 350, 40), ("busy", 60, 7)]
    run_full(rows, 3, 64)
    run_full(rows[:1], 8, 64)


def test_prefix_of_several_runs() -> None:
    """Two long runs with scattered slots between and behind them, own tokens in a third."""
    ranges = [(0, 500, 1), (501, 540, 2), (600, 1100, 1), (1200, 1230, 1)]
    slots = torch.cat([torch.arange(*bounds) for bounds in ranges])
    geometry = Geometry(6, 2, NUM_SLOTS)
    k, v = make_pool(2, 64, [slots], torch.float32)
    for queries in (1, 3, 20, 30, 45, 60, 600):
        q = torch.randn(queries, 6, 64)
        out = full_attention(q, k, v, plan_full([slots], [queries], geometry), 0.125)
        want, _ = dense(q, k, v, slots, 0.125)
        torch.testing.assert_close(out.double(), want, **TOL32)


def test_chunked_single_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_single, "_chunks", lambda longest, bags: -(-longest // 48))
    run_full([("busy", 611, 1), ("contiguous", 550, 1), ("scattered", 1, 1)], 3, 64)


@pytest.mark.parametrize("group", [1, 3, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sparse(group: int, dtype: torch.dtype) -> None:
    lens = [1, 560, 547, 90, 2, 560]
    taken: set[int] = set()
    rows = [make_slots("scattered", n, taken, i) for i, n in enumerate(lens)]
    k, v = make_pool(2, 64, rows, dtype)
    table = torch.full((len(lens), 570), 10**12)  # padding must never be read
    for i, row in enumerate(rows):
        table[i, : row.numel()] = row
    geometry = Geometry(2 * group, 2, NUM_SLOTS)
    q = torch.randn(len(lens), 2 * group, 64).to(dtype)
    plan = plan_sparse(table, torch.tensor(lens), geometry, dtype)
    out = sparse_attention(q, k, v, plan, 0.125)
    tol = TOL32 if dtype == torch.float32 else TOL16
    for i, row in enumerate(rows):
        want, _ = dense(q[i : i + 1], k, v, row, 0.125)
        torch.testing.assert_close(out[i : i + 1].double(), want, **tol)
    assert torch.equal(out, sparse_attention(q, k, v, plan, 0.125))


@pytest.mark.parametrize("reduction", ["mean", "sum", "max"])
@pytest.mark.parametrize("queries", [1, 4])
def test_page_scores_keep_the_mass(reduction: str, queries: int) -> None:
    slots = torch.arange(100, 700)
    k, v = make_pool(2, 64, [slots], torch.float32)
    geometry = Geometry(6, 2, NUM_SLOTS)
    plan = plan_full([slots], [queries], geometry)
    q = torch.randn(queries, 6, 64)
    _, (pages,) = full_attention_with_scores(q, k, v, plan, 0.125, [Vote(0)], reduction=reduction)
    total = float(pages.sum())
    if reduction == "max":
        assert 1 <= total <= 6
    else:
        assert total == pytest.approx({"mean": 1, "sum": 6}[reduction], rel=1e-5)


def test_empty_batches() -> None:
    geometry = Geometry(6, 2, NUM_SLOTS)
    k, v = make_pool(2, 64, [], torch.float32)
    q = torch.empty(0, 6, 64)
    assert full_attention(q, k, v, plan_full([], [], geometry), 1.0).shape == q.shape
    empty = plan_sparse(torch.empty(0, 4, dtype=torch.int64), torch.empty(0), geometry)
    assert sparse_attention(q, k, v, empty, 1.0).shape == q.shape


def test_errors() -> None:
    with pytest.raises(ValueError, match="divide"):
        Geometry(5, 2, 10)
    geometry = Geometry(6, 2, NUM_SLOTS)
    slots = torch.arange(4)
    with pytest.raises(ValueError, match="query tokens"):
        plan_full([slots], [5], geometry)
    with pytest.raises(ValueError, match="query lengths"):
        plan_full([slots], [], geometry)
    with pytest.raises(ValueError, match="without any slot"):
        plan_sparse(slots.view(1, 4), torch.tensor([0]), geometry)
    with pytest.raises(ValueError, match="in a table of"):
        plan_sparse(slots.view(1, 4), torch.tensor([5]), geometry)
    for bad in (-1, NUM_SLOTS):
        with pytest.raises(ValueError, match="in a pool of"):
            plan_sparse(torch.tensor([[3, bad]]), torch.tensor([2]), geometry)
        with pytest.raises(ValueError, match="in a pool of"):
            plan_full([torch.tensor([3, bad])], [2], geometry)
    plan = plan_full([slots], [2], geometry)
    k, v = make_pool(2, 64, [slots], torch.float32)
    q = torch.randn(2, 6, 64)
    with pytest.raises(ValueError, match="votes asked"):
        full_attention_with_scores(q, k, v, plan, 1.0, [Vote(0, (2,))])
    with pytest.raises(ValueError, match="plan of"):
        full_attention(q[:1], k, v, plan, 1.0)
    with pytest.raises(ValueError, match="planned for"):
        full_attention(q, k[:, :10], v, plan, 1.0)
