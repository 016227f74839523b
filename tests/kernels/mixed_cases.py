"""Mixed steps with everything that must not be read poisoned, and their float64 reference."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from aspire_sglang.attention.mixed import AttentionSpec, HostLengths, MixedPlan, MixedStep

# Far outside of any pool: a table entry beyond the row's length is never looked up.
NO_PAGE = 2**30


@dataclass
class Case:
    """One layer of one step.

    ``k`` and ``v`` are NaN wherever no row may look.
    """

    spec: AttentionSpec
    step: MixedStep
    q: Tensor
    k: Tensor
    v: Tensor

    def owners(self) -> list[tuple[int, int]]:
        """Row and number within the row of every owned query token."""
        assert self.step.host is not None
        starts = self.step.host.cu_seqlens_q
        return [
            (row, i)
            for row in range(self.step.num_rows)
            for i in range(starts[row + 1] - starts[row])
        ]


def make_spec(
    dtype: torch.dtype = torch.float32,
    *,
    group: int = 3,
    kv_heads: int = 2,
    dim: int = 64,
    page: int = 16,
    cap: float = 0.0,
    kv_dtype: torch.dtype | None = None,
) -> AttentionSpec:
    return AttentionSpec(
        num_heads=group * kv_heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        page_size=page,
        dtype=dtype,
        kv_dtype=kv_dtype or dtype,
        scale=dim**-0.5,
        logit_cap=cap,
    )


def make_case(
    spec: AttentionSpec,
    q_lens: list[int],
    lengths: list[int],
    *,
    seed: int = 0,
    device: str = "cpu",
    spare_tokens: int = 0,
    max_seqlen_q: int | None = None,
    width: int | None = None,
) -> Case:
    """Rows with these query tokens and lengths; pages are scattered, each used by one row.

    ``spare_tokens`` query tokens at the end belong to no row.
    """
    gen = torch.Generator().manual_seed(seed)
    counts = [-(-length // spec.page_size) for length in lengths]
    num_pages = sum(counts) + 3
    order = torch.randperm(num_pages, generator=gen)
    table = torch.full((len(lengths), width or max(*counts, 1)), NO_PAGE, dtype=torch.int32)
    shape = (num_pages * spec.page_size, spec.num_kv_heads, spec.head_dim)
    pools = [torch.full(shape, float("nan")) for _ in range(2)]
    taken = 0
    for row, (count, length) in enumerate(zip(counts, lengths, strict=True)):
        pages = order[taken : taken + count]
        taken += count
        table[row, :count] = pages.int()
        places = (pages[:, None] * spec.page_size + torch.arange(spec.page_size)).flatten()
        for pool in pools:
            pool[places[:length]] = torch.randn(length, *shape[1:], generator=gen)
    starts = [0]
    for q_len in q_lens:
        starts.append(starts[-1] + q_len)
    q = torch.randn(starts[-1] + spare_tokens, spec.num_heads, spec.head_dim, generator=gen)
    step = MixedStep(
        page_table=table.to(device),
        cache_seqlens=torch.tensor(lengths, dtype=torch.int32, device=device),
        cu_seqlens_q=torch.tensor(starts, dtype=torch.int32, device=device),
        max_seqlen_q=max_seqlen_q or max(q_lens),
        host=HostLengths(list(lengths), starts),
    )
    k, v = (pool.to(device, spec.kv_dtype) for pool in pools)
    return Case(spec, step, q.to(device, spec.dtype), k, v)


def reference(case: Case, k_scale: float = 1.0, v_scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Output ``[T, Hq, D]`` and log-sum-exp ``[T, Hq]`` in float64; NaN for unowned tokens."""
    spec, step = case.spec, case.step
    assert step.host is not None
    out = torch.full(case.q.shape, float("nan"), dtype=torch.float64)
    lse = torch.full(case.q.shape[:2], float("nan"), dtype=torch.float64)
    table = step.page_table.cpu().long()
    q, k, v = (tensor.cpu().double() for tensor in (case.q, case.k.float(), case.v.float()))
    for row, i in case.owners():
        token = step.host.cu_seqlens_q[row] + i
        q_len = step.host.cu_seqlens_q[row + 1] - step.host.cu_seqlens_q[row]
        seen = torch.arange(max(0, step.host.cache_seqlens[row] - q_len + i + 1))
        places = table[row, seen // spec.page_size] * spec.page_size + seen % spec.page_size
        keys = (k[places] * k_scale).repeat_interleave(spec.group, 1)
        values = (v[places] * v_scale).repeat_interleave(spec.group, 1)
        logits = torch.einsum("hd,nhd->hn", q[token], keys) * spec.scale
        if spec.logit_cap:
            logits = spec.logit_cap * torch.tanh(logits / spec.logit_cap)
        out[token] = torch.einsum("hn,nhd->hd", logits.softmax(-1), values)
        lse[token] = logits.logsumexp(-1)
    return out, lse


def check(
    case: Case,
    plan: MixedPlan,
    *,
    tol: float,
    lse_tol: float = 1e-4,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    out: Tensor | None = None,
) -> None:
    """Run a plan on poisoned outputs and compare everything with the reference.

    Logits are sums in float32 whatever the type, so ``lse_tol`` is far below ``tol``: one token
    left out of a thousand changes an output by less than its rounding.
    """
    out = torch.full_like(case.q, float("nan")) if out is None else out
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    given, lse = plan.run(case.q, case.k, case.v, out=out, return_lse=True, **scales)
    assert given.data_ptr() == out.data_ptr()
    assert lse is not None
    assert lse.shape == case.q.shape[:2]
    assert lse.dtype == torch.float32
    want, want_lse = reference(case, k_scale, v_scale)
    owned = len(case.owners())
    torch.testing.assert_close(out[:owned].cpu().double(), want[:owned], atol=tol, rtol=tol)
    torch.testing.assert_close(
        lse[:owned].cpu().double(), want_lse[:owned], atol=lse_tol, rtol=lse_tol
    )
    assert out[owned:].isnan().all()
    without, none = plan.run(case.q, case.k, case.v, **scales)
    assert none is None
    torch.testing.assert_close(without[:owned], out[:owned], atol=tol, rtol=tol)


def check_counts(case: Case, plan: MixedPlan) -> None:
    """With queries of zero, every token weighs the same and the log-sum-exp counts them."""
    case.q.zero_()
    _, lse = plan.run(case.q, case.k, case.v, return_lse=True)
    assert lse is not None
    host = case.step.host
    assert host is not None
    for token, (row, i) in enumerate(case.owners()):
        q_len = host.cu_seqlens_q[row + 1] - host.cu_seqlens_q[row]
        seen = host.cache_seqlens[row] - q_len + i + 1
        counted = lse[token].exp()
        assert counted.tolist() == [pytest.approx(seen, abs=0.3)] * case.spec.num_heads, (row, i)
