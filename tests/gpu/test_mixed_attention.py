"""Every mixed attention implementation on a GPU, against float64, and inside CUDA graphs."""

from __future__ import annotations

import random

import pytest
import torch

from aspire_sglang.attention.mixed import HostLengths, MixedStep, create_mixed_attention
from aspire_sglang.attention.triton_mixed import Launch, TritonMixedAttention
from tests.kernels.mixed_cases import Case, check, check_counts, make_case, make_spec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

NAMES = ["fa3", "triton", "flashinfer"]
# FlashInfer approximates more.
LSE_TOL = {"fa3": 1e-4, "triton": 1e-4, "flashinfer": 2e-3}
# bfloat16 and float16 probabilities and outputs; values of order one.
TOL = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 2e-5}

LAUNCHES = [(64, 16, 4, 3), (64, 32, 2, 4), (64, 32, 4, 3), (64, 64, 4, 3), (32, 32, 4, 4)]


def attention_of(name: str, case: Case):
    try:
        return create_mixed_attention(
            name, case.spec, max_seqlen_q=case.step.max_seqlen_q, device="cuda"
        )
    except RuntimeError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("page", [1, 16, 64])
@pytest.mark.parametrize(("group", "kv_heads", "dim"), [(3, 3, 64), (4, 8, 128)])
def test_draft_and_verify_rows_together(name, page, group, kv_heads, dim):
    spec = make_spec(torch.bfloat16, group=group, kv_heads=kv_heads, dim=dim, page=page)
    case = make_case(
        spec, [1, 9, 1, 9, 4], [700, 3000, 520, 9, 1111], device="cuda", max_seqlen_q=9
    )
    check(
        case, attention_of(name, case).plan(case.step), tol=TOL[spec.dtype], lse_tol=LSE_TOL[name]
    )


@pytest.mark.parametrize("name", NAMES)
def test_inert_and_empty_rows(name):
    spec = make_spec(torch.bfloat16, kv_heads=3)
    case = make_case(
        spec, [0, 1, 0, 4, 2, 0], [0, 50, 30, 4, 0, 0], device="cuda", spare_tokens=3,
        max_seqlen_q=4, width=40,
    )  # fmt: skip
    check(
        case, attention_of(name, case).plan(case.step), tol=TOL[spec.dtype], lse_tol=LSE_TOL[name]
    )


@pytest.mark.parametrize(("block_n", "large_m", "warps", "stages"), LAUNCHES)
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 7, 8])
@pytest.mark.parametrize("dim", [64, 128])
def test_triton_counts_every_listed_token_once(group, dim, block_n, large_m, warps, stages):
    """Of any launch: which instructions a query's bounds become depends on all of this."""
    spec = make_spec(torch.bfloat16, group=group, dim=dim)
    case = make_case(
        spec, [1, 9, 1, 9, 4], [700, 3000, 520, 9, 1111], device="cuda", max_seqlen_q=9
    )
    launch = Launch(block_n, 16, large_m, warps, stages, programs=300)
    attention = TritonMixedAttention(spec, max_seqlen_q=9, launch=launch)
    check_counts(case, attention.plan(case.step))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("group", [1, 8])
def test_triton_types_and_groups(dtype, group):
    spec = make_spec(dtype, group=group, dim=128)
    case = make_case(spec, [1, 9, 1], [70, 900, 333], device="cuda")
    check(case, attention_of("triton", case).plan(case.step), tol=TOL[dtype])


def test_triton_logit_cap():
    spec = make_spec(torch.bfloat16, cap=2.0)
    case = make_case(spec, [1, 9], [300, 900], device="cuda")
    check(case, attention_of("triton", case).plan(case.step), tol=TOL[spec.dtype])


def test_triton_eight_bit_pool():
    spec = make_spec(torch.bfloat16, kv_dtype=torch.float8_e4m3fn)
    case = make_case(spec, [1, 9], [300, 900], device="cuda")
    plan = attention_of("triton", case).plan(case.step)
    check(case, plan, tol=TOL[spec.dtype], k_scale=0.7, v_scale=1.9)


@pytest.mark.parametrize("seed", range(12))
def test_triton_random_steps(seed):
    rng = random.Random(seed)
    spec = make_spec(
        torch.bfloat16,
        group=rng.choice([1, 3, 4, 8]),
        kv_heads=rng.choice([1, 3, 8]),
        dim=rng.choice([64, 128]),
        page=rng.choice([1, 16, 64]),
    )
    rows = rng.randint(1, 40)
    q_lens = [rng.choice([0, 1, 1, 1, rng.randint(2, 9)]) for _ in range(rows)]
    lengths = [n + rng.choice([0, 3, rng.randint(0, 400), rng.randint(0, 4000)]) for n in q_lens]
    case = make_case(spec, q_lens, lengths, seed=seed, device="cuda", max_seqlen_q=9)
    check(case, attention_of("triton", case).plan(case.step), tol=TOL[spec.dtype])


@pytest.mark.parametrize("name", NAMES)
def test_one_plan_serves_other_tables_of_the_same_lengths(name):
    """As layers that have page lists of their own need it."""
    spec = make_spec(torch.bfloat16, kv_heads=3)
    q_lens, lengths = [1, 9, 1, 4], [700, 3000, 520, 1111]
    first, second = (
        make_case(spec, q_lens, lengths, device="cuda", seed=seed, max_seqlen_q=9)
        for seed in range(2)
    )
    plan = attention_of(name, first).plan(first.step)
    options = {"tol": TOL[spec.dtype], "lse_tol": LSE_TOL[name]}
    check(second, plan.over(second.step.page_table), **options)
    check(first, plan, **options)


@pytest.mark.parametrize("name", NAMES)
def test_one_graph_serves_other_lengths_and_modes(name):
    """A graph recorded over one step computes another whose tensors replace the first ones'."""
    spec = make_spec(torch.bfloat16, kv_heads=3)
    most = make_case(spec, [9, 9, 9], [2000, 1500, 900], device="cuda", width=130)
    later = make_case(
        spec, [1, 9, 0], [500, 2050, 0], device="cuda", width=130, seed=1, spare_tokens=17,
        max_seqlen_q=9,
    )  # fmt: skip
    attention = attention_of(name, most)
    step = MixedStep(
        most.step.page_table.clone(),
        most.step.cache_seqlens.clone(),
        most.step.cu_seqlens_q.clone(),
        9,
    )
    q, out = torch.zeros_like(most.q), torch.full_like(most.q, float("nan"))
    pool_k, pool_v = (torch.zeros(400 * 16, 3, 64, dtype=q.dtype, device="cuda") for _ in "kv")

    def load(case: Case) -> MixedStep:
        assert case.step.host is not None
        for have, want in (
            (step.page_table, case.step.page_table),
            (step.cache_seqlens, case.step.cache_seqlens),
            (step.cu_seqlens_q, case.step.cu_seqlens_q),
            (q, case.q),
            (pool_k[: len(case.k)], case.k),
            (pool_v[: len(case.v)], case.v),
        ):
            have.copy_(want)
        out.fill_(float("nan"))
        host = HostLengths(case.step.host.cache_seqlens, case.step.host.cu_seqlens_q)
        return MixedStep(step.page_table, step.cache_seqlens, step.cu_seqlens_q, 9, host)

    def run() -> torch.Tensor:
        plan = attention.plan(loaded) if not attention.plans_on_host else planned
        return plan.run(q, pool_k, pool_v, out=out, return_lse=True)[1]

    loaded = load(most)
    planned = attention.plan(loaded)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        lse = run()

    class Replayed:
        def run(self, *_, return_lse: bool = False, **__):
            return out, lse if return_lse else None

    for case in (later, most, later):
        loaded = load(case)
        if attention.plans_on_host:
            attention.plan(loaded)
        graph.replay()
        torch.cuda.synchronize()
        check(case, Replayed(), tol=TOL[spec.dtype], lse_tol=LSE_TOL[name], out=out)
