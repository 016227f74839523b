"""The CPU attention kernel and its page scores against a dense float64 reference."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from aspire_sglang.attention import cpu_plan, openmp
from aspire_sglang.attention.cpu_attention import CpuAttention
from aspire_sglang.attention.cpu_plan import Row
from aspire_sglang.attention.simd import LANES

NUM_SLOTS = 2500
# float32 sums of up to a thousand terms of order one.
TOL32 = {"atol": 3e-6, "rtol": 3e-5}
# Sums are float32; only the output is rounded, to 9 bits.
TOL16 = {"atol": 1e-4, "rtol": 4e-3}


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


def run(
    rows: list[tuple[str, int, int]],
    group: int,
    dim: int,
    dtype: torch.dtype = torch.float32,
    cap: float = 0.0,
    page_size: int = 16,
) -> None:
    """Rows of (kind of slots, keys, query tokens) against the reference."""
    kv_heads = 2
    taken: set[int] = set()
    slots = [make_slots(kind, length, taken, i) for i, (kind, length, _) in enumerate(rows)]
    k, v = make_pool(kv_heads, dim, slots, dtype)
    q_lens = [n for _, _, n in rows]
    gen = torch.Generator().manual_seed(1)
    q = (2 * torch.randn(sum(q_lens), kv_heads * group, dim, generator=gen)).to(dtype)
    attention = CpuAttention(kv_heads * group, kv_heads, NUM_SLOTS, dim, dtype)
    scale = 1 / math.sqrt(dim)
    silent = [Row(s.int(), n) for s, n in zip(slots, q_lens, strict=True)]
    out = attention.attend(q, k, v, attention.plan(silent), scale, logit_cap=cap)
    voting = [Row(row.slots, row.tokens, tuple(sorted({0, row.tokens - 1}))) for row in silent]
    plan = attention.plan(voting)
    assert torch.equal(out, attention.attend(q, k, v, plan, scale, logit_cap=cap))
    pages = attention.page_scores(plan, page_size)
    assert out.dtype == dtype
    start = 0
    for i, (_, length, queries) in enumerate(rows):
        part = q[start : start + queries]
        want, probs = dense(part, k, v, slots[i], scale, cap)
        tol = TOL32 if dtype == torch.float32 else TOL16
        torch.testing.assert_close(out[start : start + queries].double(), want, **tol)
        tokens = probs[list(voting[i].voters)].amax(1).mean(0)
        expect = torch.stack([chunk.sum() for chunk in tokens.split(page_size)])
        assert pages[i].shape == (math.ceil(length / page_size),)
        torch.testing.assert_close(pages[i].double(), expect, atol=1e-6, rtol=1e-4)
        start += queries


@pytest.mark.parametrize("dim", [16, 64, 80, 128])
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
    run(rows, group, dim)


@pytest.mark.parametrize("dim", [1, 7, LANES + 1, 40])
def test_widths_that_fill_no_vector(dim: int) -> None:
    run([("busy", 200, 1), ("scattered", 90, 6)], 3, dim)


@pytest.mark.parametrize("queries", range(1, 18))
@pytest.mark.parametrize("kind", ["contiguous", "scattered", "busy"])
def test_query_lengths(kind: str, queries: int) -> None:
    run([(kind, 523, queries), (kind, queries, queries)], 3, 64)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits(dtype: torch.dtype) -> None:
    rows = [("busy", 611, 1), ("contiguous", 300, 5), ("scattered", 77, 1), ("busy", 431, 290)]
    run(rows, 3, 64, dtype)


@pytest.mark.parametrize("cap", [3.0, 50.0])
def test_logit_cap(cap: float) -> None:
    run([("busy", 400, 1), ("busy", 400, 6)], 2, 64, cap=cap)


@pytest.mark.parametrize("kind", ["contiguous", "scattered", "busy"])
@pytest.mark.parametrize(("length", "queries"), [(300, 300), (1500, 290), (513, 129), (601, 48)])
def test_prefill_chunks(kind: str, length: int, queries: int) -> None:
    run([(kind, length, queries)], 3, 64)


def test_more_heads_in_a_group_than_lanes_in_a_block() -> None:
    run([("busy", 300, 1), ("scattered", 70, 5)], 5 * LANES, 16)


@pytest.mark.parametrize("page_size", [1, 7, 64])
def test_page_sizes(page_size: int) -> None:
    run([("busy", 611, 1), ("contiguous", 300, 5), ("scattered", 3, 2)], 3, 64, page_size=page_size)


@pytest.mark.parametrize("fewest", [32, 100])
@pytest.mark.parametrize("per_thread", [1, 50])
def test_shared_out_rows(monkeypatch: pytest.MonkeyPatch, fewest: int, per_thread: int) -> None:
    """However keys are divided over pieces, the result is the same, voters among them."""
    monkeypatch.setattr(cpu_plan, "_FEWEST_KEYS", fewest)
    monkeypatch.setattr(cpu_plan, "_PIECES_PER_THREAD", per_thread)
    rows = [("busy", 1000, 5), ("contiguous", 700, 1), ("scattered", 350, 140), ("busy", 60, 7)]
    run(rows, 3, 64)
    run(rows[:1], 8, 64)


def test_a_long_row_is_shared_out() -> None:
    attention = CpuAttention(6, 2, NUM_SLOTS, 64, torch.float32)
    plan = attention.plan([Row(torch.arange(2000, dtype=torch.int32), 9)])
    assert len(plan.pieces) > 1
    spans = sorted((int(piece["first"]), int(piece["stop"])) for piece in plan.pieces)
    assert spans[0][0] == 0
    assert spans[-1][1] == 2000
    assert all(a[1] == b[0] for a, b in itertools.pairwise(spans))


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        run([("busy", 1000, 5), ("scattered", 400, 1)], 3, 64)
    finally:
        torch.set_num_threads(before)


def test_large_scores_neither_overflow_nor_vanish() -> None:
    k, v = make_pool(2, 64, [torch.arange(100)], torch.float32)
    q = 1e4 * torch.randn(3, 6, 64)
    attention = CpuAttention(6, 2, NUM_SLOTS, 64, torch.float32)
    plan = attention.plan([Row(torch.arange(100, dtype=torch.int32), 3)])
    out = attention.attend(q, k, v, plan, 1.0)
    want, _ = dense(q, k, v, torch.arange(100), 1.0)
    torch.testing.assert_close(out.double(), want, atol=1e-2, rtol=1e-2)


def test_writes_into_a_given_tensor_of_any_layout() -> None:
    slots = torch.arange(50, dtype=torch.int32)
    k, v = make_pool(2, 64, [slots.long()], torch.float32)
    attention = CpuAttention(6, 2, NUM_SLOTS, 64, torch.float32)
    plan = attention.plan([Row(slots, 4)])
    q = torch.randn(4, 6, 64)
    want = attention.attend(q, k, v, plan, 0.125)
    target = torch.empty(6, 4, 64).transpose(0, 1)
    assert attention.attend(q.double(), k, v, plan, 0.125, target) is target
    assert torch.equal(target, want)


@pytest.mark.parametrize("reduction", ["mean", "sum", "max"])
@pytest.mark.parametrize("queries", [1, 4])
def test_page_scores_keep_the_mass(reduction: str, queries: int) -> None:
    slots = torch.arange(100, 700, dtype=torch.int32)
    k, v = make_pool(2, 64, [slots.long()], torch.float32)
    attention = CpuAttention(6, 2, NUM_SLOTS, 64, torch.float32)
    plan = attention.plan([Row(slots, queries, (queries - 1,))])
    attention.attend(torch.randn(queries, 6, 64), k, v, plan, 0.125)
    (pages,) = attention.page_scores(plan, 16, reduction)
    total = float(pages.sum())
    if reduction == "max":
        assert 1 <= total <= 6
    else:
        assert total == pytest.approx({"mean": 1, "sum": 6}[reduction], rel=1e-5)


def test_empty_batches() -> None:
    attention = CpuAttention(6, 2, NUM_SLOTS, 64, torch.float32)
    k, v = make_pool(2, 64, [], torch.float32)
    q = torch.empty(0, 6, 64)
    plan = attention.plan([])
    assert attention.attend(q, k, v, plan, 1.0).shape == q.shape
    assert attention.page_scores(plan, 16) == []


def test_errors() -> None:
    with pytest.raises(ValueError, match="divide"):
        CpuAttention(5, 2, 10, 64, torch.float32)
    with pytest.raises(ValueError, match="float64"):
        CpuAttention(6, 2, 10, 64, torch.float64)
    with pytest.raises(ValueError, match="multiple of"):
        CpuAttention(6, 2, 10, LANES + 1, torch.bfloat16)
    attention = CpuAttention(6, 2, NUM_SLOTS, 64, torch.float32)
    slots = torch.arange(4, dtype=torch.int32)
    for row, match in (
        (Row(slots, 5), "query tokens"),
        (Row(slots, 0), "query tokens"),
        (Row(slots.long(), 1), "int32"),
        (Row(torch.arange(8, dtype=torch.int32)[::2], 1), "contiguous"),
        (Row(slots, 2, (2,)), "votes asked"),
        (Row(slots, 4, (0, 1, 2)), "votes asked"),
        (Row(torch.tensor([3, -1], dtype=torch.int32), 1), "in a pool of"),
        (Row(torch.tensor([3, NUM_SLOTS], dtype=torch.int32), 2), "in a pool of"),
    ):
        with pytest.raises(ValueError, match=match):
            attention.plan([row])
    plan = attention.plan([Row(slots, 2)])
    k, v = make_pool(2, 64, [slots.long()], torch.float32)
    q = torch.randn(2, 6, 64)
    with pytest.raises(ValueError, match="2 tokens"):
        attention.attend(q[:1], k, v, plan, 1.0)
    with pytest.raises(ValueError, match="planned for"):
        attention.attend(q, k[:, :10], v, plan, 1.0)
    with pytest.raises(ValueError, match="planned for"):
        attention.attend(q, k.half(), v.half(), plan, 1.0)


def test_without_an_openmp_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openmp, "_runtimes", list)
    openmp.parallel_region.cache_clear()
    try:
        with pytest.raises(RuntimeError, match="torch_native"):
            CpuAttention(6, 2, 10, 64, torch.float32)
    finally:
        openmp.parallel_region.cache_clear()
