"""The Triton kernels compiled for a CUDA device, against float64 references."""

import pytest
import torch
from triton.runtime.interpreter import InterpretedFunction

from aspire_sglang.context import PageLists, SelectionConfig
from aspire_sglang.kernels import page_scores, page_selection, page_tables, reference
from aspire_sglang.kernels.vote_rows import KeyScan, VoteRows
from tests.kernels import cases

pytestmark = pytest.mark.skipif(
    isinstance(page_scores._page_scores_kernel, InterpretedFunction),
    reason="triton was imported for its interpreter; run tests/gpu in a process of its own",
)

VOTE_SHAPES = pytest.mark.parametrize("shape", cases.VOTE_SHAPES.values(), ids=cases.VOTE_SHAPES)
LIST_SHAPES = pytest.mark.parametrize("shape", cases.LIST_SHAPES.values(), ids=cases.LIST_SHAPES)
LONG = cases.VoteShape((20011, 12345, 7, 0), kv_heads=8, group=4, dim=128)


@VOTE_SHAPES
@pytest.mark.parametrize("reduction", ["max", "mean", "sum"])
def test_page_scores(shape, reduction):
    cases.check_page_scores(shape, torch.bfloat16, "cuda", reduction)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_page_scores_of_other_types(dtype):
    cases.check_page_scores(cases.VOTE_SHAPES["group 3, odd lengths"], dtype, "cuda", "max")


@pytest.mark.parametrize("scan", [KeyScan(), KeyScan(block=64, warps=8, stages=1, programs=50)])
def test_page_scores_of_a_long_context(scan):
    cases.check_page_scores(LONG, torch.bfloat16, "cuda", "max", scan)


@VOTE_SHAPES
@pytest.mark.parametrize("per_head", [True, False])
def test_page_lse(shape, per_head):
    cases.check_page_lse(shape, torch.bfloat16, "cuda", per_head, normalized=not per_head)


def test_page_lse_of_a_long_context():
    cases.check_page_lse(LONG, torch.bfloat16, "cuda", per_head=False, normalized=True)


def test_page_scores_reach_the_end_of_a_large_pool():
    """Offsets beyond 2**31 elements."""
    if torch.cuda.mem_get_info()[0] < 8 << 30:
        pytest.skip("needs 8 GiB of free device memory")
    small = cases.votes(cases.VoteShape((300,), kv_heads=8, dim=128), torch.bfloat16, "cuda")
    num_slots = (1 << 31) // (8 * 128) + 4096
    k = torch.empty(num_slots, 8, 128, dtype=torch.bfloat16, device="cuda")
    first = num_slots - small.k.shape[0]
    k[first:] = small.k
    options = {"page_size": 16, "scale": small.scale}
    lse = reference.query_lse(small.q, small.k, small.req_to_token, small.rows, small.scale)
    got, want = (torch.zeros(1, small.max_pages, device="cuda") for _ in range(2))
    moved = small.req_to_token + first
    page_scores.page_scores(small.q, lse, k, moved, small.rows, got, **options)
    reference.page_scores(small.q, lse, small.k, small.req_to_token, small.rows, want, **options)
    torch.testing.assert_close(got, want, rtol=2e-4, atol=2e-6)


@LIST_SHAPES
@pytest.mark.parametrize("kind", cases.SCORES)
def test_select_pages(shape, kind):
    cases.check_select_pages(shape, kind, "cuda")


@pytest.mark.parametrize("kind", cases.SCORES)
@pytest.mark.parametrize("longest", [40_000, 131_072, 1_000_000])
def test_select_pages_of_a_long_context(kind, longest):
    shape = cases.ListShape((longest, longest // 3, 100, 0), min_pages=32, last=8)
    cases.check_select_pages(shape, kind, "cuda")


def test_budgets_equal_the_hosts():
    for ratio in (0.07, 0.1, 0.29, 1 / 3):
        config = SelectionConfig(page_size=1, min_pages=3, ratio=ratio, last_pages=1)
        lens = torch.arange(1, 2001, device="cuda")
        lists = PageLists(2000, config.budget_pages(2000), config, "cuda")
        scores = torch.rand(2000, 2000, device="cuda")
        page_selection.select_pages(scores, lens, torch.arange(2000, device="cuda"), lists)
        assert lists.counts.tolist() == [min(config.budget_pages(n), n) for n in range(1, 2001)]


@LIST_SHAPES
@pytest.mark.parametrize("growth", [0, 5, 40])
@pytest.mark.parametrize("listed", [True, False])
def test_build_tables(shape, growth, listed):
    cases.check_build_tables(shape, "cuda", growth, listed)


@LIST_SHAPES
def test_refresh_tables(shape):
    cases.check_refresh_tables(shape, "cuda")


def test_refresh_tables_of_a_long_context():
    shape = cases.ListShape((131_072, 90_001, 5000, 40_000, 0), min_pages=32, last=8)
    cases.check_refresh_tables(shape, "cuda")


@pytest.mark.parametrize("depth", [1, 4, 16])
@pytest.mark.parametrize("seed", range(3))
def test_accept_greedy(depth, seed):
    cases.check_accept_greedy(64, depth, "cuda", seed)


def test_one_graph_serves_other_lengths():
    """Lengths, voters and padding are read on the device: a captured launch follows them."""
    shapes = [
        cases.VoteShape((700, 1, 333, 0, 90)),
        cases.VoteShape((3, 650, 0, 700, 17)),
    ]
    batches = [cases.votes(shape, torch.bfloat16, "cuda", seed=5) for shape in shapes]
    tokens = max(batch.q.shape[0] for batch in batches)
    live = batches[0]
    q = torch.zeros(tokens, *live.q.shape[1:], dtype=live.q.dtype, device="cuda")
    lse = torch.zeros(q.shape[:2], device="cuda")
    rows = VoteRows(
        live.rows.slots.clone(),
        live.rows.voters.clone(),
        torch.zeros(tokens, dtype=torch.int64, device="cuda"),
    )
    k, req_to_token = live.k.clone(), live.req_to_token.clone()
    out = torch.zeros(5, live.max_pages, device="cuda")
    config = SelectionConfig(min_pages=6, last_pages=2)
    lists = PageLists(10, 20, config, "cuda")
    lens = torch.zeros(5, dtype=torch.int64, device="cuda")
    draft = torch.ones(5, dtype=torch.bool, device="cuda")
    table = torch.zeros(5, req_to_token.shape[1], dtype=torch.int32, device="cuda")
    seqlens = torch.zeros(5, dtype=torch.int32, device="cuda")
    options = {"page_size": 16, "scale": live.scale}

    def step():
        page_scores.page_scores(q, lse, k, req_to_token, rows, out, **options)
        page_selection.select_pages(out, lens, rows.slots, lists)
        page_tables.build_tables(req_to_token, rows.slots, lens, draft, lists, table, seqlens)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for shape, batch in zip(shapes, batches, strict=True):
        count = batch.q.shape[0]
        q[:count], k[:], req_to_token[:] = batch.q, batch.k, batch.req_to_token
        lse[:count] = reference.query_lse(
            batch.q, batch.k, batch.req_to_token, batch.rows, batch.scale
        )
        rows.slots[:], rows.voters[:] = batch.rows.slots, batch.rows.voters
        rows.positions[:count] = batch.rows.positions
        lens[:] = torch.tensor(shape.lens, device="cuda")
        want = torch.zeros_like(out)
        inputs = (batch.q, lse[:count], batch.k, batch.req_to_token, batch.rows, want)
        reference.page_scores(*inputs, **options)
        want_lists = PageLists(10, 20, config, "cuda")
        want_table, want_lens = torch.zeros_like(table), torch.zeros_like(seqlens)
        out.zero_()
        table.zero_()
        graph.replay()
        torch.testing.assert_close(out, want, rtol=2e-4, atol=2e-6)
        # The kernel's own scores: ties within rounding may fall either way.
        reference.select_pages(out, lens, rows.slots, want_lists)
        reference.build_tables(
            req_to_token, rows.slots, lens, draft, want_lists, want_table, want_lens
        )
        torch.testing.assert_close(seqlens, want_lens, rtol=0, atol=0)
        torch.testing.assert_close(table, want_table, rtol=0, atol=0)
