"""The mixed attention kernel in Triton's interpreter, against float64."""

from __future__ import annotations

import os
import random

import pytest
import torch

from aspire_sglang.attention.mixed import (
    AttentionSpec,
    MixedStep,
    create_mixed_attention,
    default_mixed_attention,
    paged,
)
from tests.kernels.mixed_cases import NO_PAGE, check, check_counts, make_case, make_spec

# Triton decides at import whether a kernel is interpreted.
_before = os.environ.get("TRITON_INTERPRET")
os.environ["TRITON_INTERPRET"] = "1"
from aspire_sglang.attention.triton_mixed import Launch, TritonMixedAttention  # noqa: E402

if _before is None:
    del os.environ["TRITON_INTERPRET"]

# The interpreter cannot multiply bfloat16 matrices; tests/gpu does.
TOL = {torch.float32: 2e-6, torch.float16: 4e-3}


@pytest.fixture(autouse=True)
def interpreter(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")


def make(
    spec: AttentionSpec,
    *,
    programs: int = 5,
    block_n: int = 32,
    large_m: int = 16,
    small_m: int = 16,
    min_share: int = 1,
    max_seqlen_q: int = 16,
) -> TritonMixedAttention:
    launch = Launch(block_n, small_m, large_m, 4, 2, programs, min_share)
    return TritonMixedAttention(spec, max_seqlen_q=max_seqlen_q, device="cpu", launch=launch)


@pytest.mark.parametrize("dtype", TOL, ids=str)
@pytest.mark.parametrize("page", [1, 16, 64])
def test_draft_and_verify_rows_together(dtype, page):
    spec = make_spec(dtype, page=page)
    case = make_case(spec, [1, 5, 1, 5], [40, 131, 17, 96], seed=page)
    check(case, make(spec).plan(case.step), tol=TOL[dtype])


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("group", [1, 2, 4, 5, 8])
def test_head_groups(dim, group):
    spec = make_spec(dim=dim, group=group)
    case = make_case(spec, [1, 9, 2], [50, 70, 33], seed=group)
    check(case, make(spec, large_m=32).plan(case.step), tol=2e-6)


@pytest.mark.parametrize("programs", [1, 2, 7, 64])
@pytest.mark.parametrize("min_share", [1, 3, 100])
def test_any_number_of_pieces(programs, min_share):
    spec = make_spec(group=2)
    case = make_case(spec, [3, 1, 1, 3], [200, 20, 64, 33], seed=programs)
    attention = make(spec, programs=programs, min_share=min_share)
    check(case, attention.plan(case.step), tol=2e-6)


def test_rows_that_begin_and_end_at_block_and_piece_borders():
    # 2 KV heads x (2 + 1 + 3) blocks over 6 programs: pieces of exactly two blocks.
    spec = make_spec(group=1)
    case = make_case(spec, [1, 1, 1], [64, 32, 96])
    check(case, make(spec, programs=6).plan(case.step), tol=2e-6)


def test_more_queries_than_a_tile_holds():
    spec = make_spec(group=3)
    case = make_case(spec, [13, 1, 16], [90, 40, 16])
    check(case, make(spec).plan(case.step), tol=2e-6)


def test_inert_and_empty_rows():
    spec = make_spec()
    case = make_case(
        spec, [0, 1, 0, 4, 2, 0], [0, 50, 30, 4, 0, 0], spare_tokens=3, width=9, max_seqlen_q=4
    )
    check(case, make(spec).plan(case.step), tol=2e-6)


def test_only_inert_rows():
    spec = make_spec()
    case = make_case(spec, [0, 0], [0, 64], spare_tokens=2, max_seqlen_q=4)
    check(case, make(spec).plan(case.step), tol=2e-6)


def test_fewer_listed_tokens_than_queries():
    spec = make_spec()
    case = make_case(spec, [4, 1], [2, 40])
    check(case, make(spec).plan(case.step), tol=2e-6)


def test_logit_cap():
    spec = make_spec(cap=1.5)
    case = make_case(spec, [1, 4], [40, 70])
    case.q *= 5
    check(case, make(spec).plan(case.step), tol=5e-6)


def test_eight_bit_pool_with_scales():
    spec = make_spec(kv_dtype=torch.float8_e4m3fn)
    case = make_case(spec, [1, 4], [40, 70])
    check(case, make(spec).plan(case.step), tol=5e-6, k_scale=0.7, v_scale=1.9)


def test_large_logits_do_not_overflow():
    spec = make_spec()
    case = make_case(spec, [1, 4], [40, 70])
    case.q *= 300
    check(case, make(spec).plan(case.step), tol=2e-4)


def test_strided_queries_and_paged_pool():
    spec = make_spec(group=2)
    case = make_case(spec, [1, 4], [40, 70])
    plan = make(spec).plan(case.step)
    wide = torch.randn(5, 8, spec.head_dim)
    wide[:, 2:6] = case.q
    want, _ = plan.run(case.q, case.k, case.v)
    got, lse = plan.run(wide[:, 2:6], paged(case.k, 16), paged(case.v, 16))
    assert torch.equal(got, want)
    assert lse is None


def test_table_changed_after_planning():
    spec = make_spec()
    case = make_case(spec, [1, 4], [64, 70])
    plan = make(spec).plan(case.step)
    check(case, plan, tol=2e-6)
    pages = case.step.page_table[0, :4].clone()
    case.step.page_table[0, :4] = pages.flip(0)
    check(case, plan, tol=2e-6)


def test_one_plan_serves_other_tables_of_the_same_lengths():
    spec = make_spec()
    first, second = (make_case(spec, [1, 4], [64, 70], seed=seed) for seed in range(2))
    plan = make(spec).plan(first.step)
    check(second, plan.over(second.step.page_table), tol=2e-6)
    check(first, plan, tol=2e-6)


def test_rows_do_not_see_each_other():
    """A row's result is the same bits alone and in company when it is not cut."""
    spec = make_spec()
    case = make_case(spec, [1, 4], [64, 70])
    together, _ = make(spec, programs=1).plan(case.step).run(case.q, case.k, case.v)
    for row, tokens in ((0, slice(0, 1)), (1, slice(1, 5))):
        step = MixedStep(
            case.step.page_table[row : row + 1],
            case.step.cache_seqlens[row : row + 1],
            torch.tensor([0, tokens.stop - tokens.start], dtype=torch.int32),
            4,
        )
        alone, _ = make(spec, programs=1).plan(step).run(case.q[tokens], case.k, case.v)
        assert torch.equal(alone, together[tokens])


@pytest.mark.parametrize("page", [1, 16, 64])
def test_every_listed_token_counts_once(page):
    spec = make_spec(page=page)
    case = make_case(spec, [1, 5, 1, 4], [200, 131, 17, 96], seed=page)
    check_counts(case, make(spec, large_m=32).plan(case.step))


@pytest.mark.parametrize("seed", range(25))
def test_random_steps(seed):
    rng = random.Random(seed)
    group, page = rng.choice([1, 3, 4, 8]), rng.choice([1, 16, 64])
    spec = make_spec(group=group, page=page, kv_heads=rng.choice([1, 2, 3]))
    rows = rng.randint(1, 7)
    q_lens = [rng.choice([0, 1, 1, 1, rng.randint(2, 9)]) for _ in range(rows)]
    lengths = [rng.choice([0, n, n + rng.randint(0, 160)]) for n in q_lens]
    case = make_case(
        spec, q_lens, lengths, seed=seed, spare_tokens=rng.randint(0, 2), max_seqlen_q=9
    )
    attention = make(
        spec,
        programs=rng.randint(1, 20),
        block_n=rng.choice([16, 32, 64]),
        large_m=rng.choice([16, 32, 64]),
        min_share=rng.choice([1, 2, 4]),
    )
    check(case, attention.plan(case.step), tol=2e-6)


def test_default_reads_eight_bit_pools():
    assert default_mixed_attention(make_spec(kv_dtype=torch.float8_e4m3fn)) == "triton"


def test_default_launch_holds_every_query():
    spec = make_spec(group=4)
    attention = TritonMixedAttention(spec, max_seqlen_q=9, device="cpu")
    case = make_case(spec, [9, 1], [100, 30])
    check(case, attention.plan(case.step), tol=2e-6)


class TestRefusals:
    def test_head_width(self):
        with pytest.raises(ValueError, match="triton: head width 96"):
            make(make_spec(dim=96))

    @pytest.mark.parametrize("name", ["triton", "fa3", "flashinfer"])
    def test_types_name_kernel_and_type(self, name):
        spec = make_spec(torch.bfloat16, kv_dtype=torch.int8)
        with pytest.raises(ValueError, match=f"{name}: KV of torch.int8 .* not supported"):
            create_mixed_attention(name, spec, max_seqlen_q=4, device="cpu")

    def test_eight_bit_pool_on_fa3(self):
        spec = make_spec(torch.bfloat16, kv_dtype=torch.float8_e4m3fn)
        with pytest.raises(ValueError, match=r"fa3: KV of torch\.float8_e4m3fn"):
            create_mixed_attention("fa3", spec, max_seqlen_q=4)

    def test_more_queries_than_announced(self):
        spec = make_spec()
        case = make_case(spec, [5], [20])
        with pytest.raises(ValueError, match="5 queries per row, at most 4"):
            make(spec, max_seqlen_q=4).plan(case.step)

    def test_unknown_name(self):
        with pytest.raises(ValueError, match="known are fa3, triton, flashinfer"):
            create_mixed_attention("fa9", make_spec(), max_seqlen_q=4)

    def test_heads_that_do_not_divide(self):
        with pytest.raises(ValueError, match="9 query heads"):
            AttentionSpec(9, 2, 64, 16, torch.float16, torch.float16, 0.125)

    def test_page_size(self):
        with pytest.raises(ValueError, match="page size 32"):
            make_spec(page=32)

    @pytest.mark.skipif(torch.cuda.is_available(), reason="about a machine without CUDA")
    def test_missing_library_is_one_sentence(self):
        with pytest.raises(RuntimeError, match="fa3: sgl_kernel's FlashAttention 3 is not usable"):
            create_mixed_attention("fa3", make_spec(torch.bfloat16), max_seqlen_q=4)


def test_no_table_entry_beyond_a_row_is_read():
    # An entry out of range would address memory far outside of the pool.
    case = make_case(make_spec(), [1], [5], width=4)
    assert case.step.page_table[0].tolist()[1:] == [NO_PAGE] * 3
    check(case, make(case.spec).plan(case.step), tol=2e-6)
