"""Mixed attention with FlashInfer's paged prefill over ragged query lengths."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from aspire_sglang.attention.mixed import AttentionSpec, HostLengths, MixedStep, paged

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
LN2 = 0.6931471805599453
# The library writes -5e4 where nothing was seen.
NOTHING_SEEN = -4.9e4
# Pieces of long rows wait here to be merged; SGLang takes the same amount for FlashInfer.
WORKSPACE_BYTES = 384 * 2**20


class FlashInferMixedAttention:
    """``BatchPrefillWithPagedKVCacheWrapper`` in its CUDA graph mode.

    FlashInfer divides the work on the host. A step without ``host`` lengths costs a
    synchronization per plan.

    Args:
        spec: shapes and types; the library reads 8-bit KV with 16-bit queries.
        device: of every tensor.

    Raises:
        RuntimeError: if ``flashinfer`` cannot be loaded.
        ValueError: for types that the kernel does not support.
    """

    name = "flashinfer"
    plans_on_host = True

    def __init__(self, spec: AttentionSpec, *, device: torch.device | str = "cuda"):
        if spec.dtype not in (torch.bfloat16, torch.float16):
            raise ValueError(f"flashinfer: queries of {spec.dtype} are not supported")
        if spec.kv_dtype != spec.dtype and spec.kv_dtype not in FLOAT8:
            raise ValueError(
                f"flashinfer: KV of {spec.kv_dtype} with queries of {spec.dtype} is not supported"
            )
        try:
            from flashinfer import BatchPrefillWithPagedKVCacheWrapper
        except Exception as error:  # its import compiles and loads more than Python
            raise RuntimeError(f"flashinfer: the library is not usable: {error}") from error
        self._wrapper_class = BatchPrefillWithPagedKVCacheWrapper
        self.spec = spec
        self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._plans: dict[tuple[int, int, int], FlashInferMixedPlan] = {}

    def plan(self, step: MixedStep) -> FlashInferMixedPlan:
        """Divide the work on the host.

        A plan belongs to a page table: planning the same table again updates the same buffers,
        which is what a captured graph needs. The first plan of a table fixes its most tokens.

        Raises:
            ValueError: if the page table is not contiguous, or more tokens come than at first.
        """
        key = (step.page_table.data_ptr(), *step.page_table.shape)
        if key not in self._plans:
            self._plans[key] = FlashInferMixedPlan(self, step.page_table)
        plan = self._plans[key]
        plan.update(step)
        return plan


class FlashInferMixedPlan:
    """One page table and the division of its rows' work; see ``MixedPlan``."""

    def __init__(self, attention: FlashInferMixedAttention, table: Tensor):
        if not table.is_contiguous():
            raise ValueError("flashinfer: the page table must be contiguous")
        rows, width = table.shape
        device = table.device
        self._attention = attention
        self._spec = attention.spec
        self._table = table
        self._qo_indptr = torch.zeros(rows + 1, dtype=torch.int32, device=device)
        self._kv_indptr = torch.arange(rows + 1, dtype=torch.int32, device=device) * width
        self._rest = torch.zeros(rows, dtype=torch.int32, device=device)
        self._nothing = torch.empty(0, dtype=torch.int32, device=device)
        self._wrapper: Any = attention._wrapper_class(
            attention._workspace,
            "NHD",
            use_cuda_graph=True,
            qo_indptr_buf=self._qo_indptr,
            paged_kv_indptr_buf=self._kv_indptr,
            paged_kv_indices_buf=table.view(-1),
            paged_kv_last_page_len_buf=self._rest,
            # The Hopper kernel of the library does not split long rows, which decoding needs.
            backend="fa2",
        )

    def over(self, page_table: Tensor) -> FlashInferMixedPlan:
        # Its buffers belong to one table, so the work is divided anew, on the host.
        return self._attention.plan(replace(self._step, page_table=page_table))

    def update(self, step: MixedStep) -> None:
        """Divide the rows' present lengths among the processors."""
        self._step = step
        spec = self._spec
        host = step.host or HostLengths(step.cache_seqlens.tolist(), step.cu_seqlens_q.tolist())
        self._tokens = host.cu_seqlens_q[-1]
        pages = [0]
        for length in host.cache_seqlens:
            pages.append(pages[-1] - (-length // spec.page_size))
        lengths = torch.tensor(host.cache_seqlens, dtype=torch.int32)
        counts = torch.tensor([b - a for a, b in pairwise(pages)], dtype=torch.int32)
        self._wrapper.plan(
            torch.tensor(host.cu_seqlens_q, dtype=torch.int32),
            torch.tensor(pages, dtype=torch.int32),
            self._nothing,
            lengths - (counts - 1) * spec.page_size,
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim,
            spec.page_size,
            causal=True,
            sm_scale=spec.scale,
            logits_soft_cap=spec.logit_cap,
            q_data_type=spec.dtype,
            kv_data_type=spec.kv_dtype,
            seq_lens=lengths,
        )
        # The division above wants compact page lists, the kernel only these two buffers, from
        # which it computes a row's length as (pages - 1) * page size + rest. So the kernel reads
        # the page table where it lies, and a table rewritten in the middle of a step counts.
        rows, width = self._table.shape
        torch.arange(0, (rows + 1) * width, width, dtype=torch.int32, out=self._kv_indptr)
        torch.sub(step.cache_seqlens, (width - 1) * spec.page_size, out=self._rest)

    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        out: Tensor | None = None,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
        return_lse: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        spec = self._spec
        out = torch.empty_like(q) if out is None else out
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device) if return_lse else None
        # The library insists on as many queries as rows own.
        owned = slice(self._tokens)
        self._wrapper.run(
            q[owned],
            (paged(k, spec.page_size), paged(v, spec.page_size)),
            k_scale=k_scale,
            v_scale=v_scale,
            out=out[owned],
            lse=lse[owned] if lse is not None else None,
            return_lse=return_lse,
        )
        if lse is not None:
            # The library's logarithms are in base 2.
            lse.masked_fill_(lse < NOTHING_SEEN, float("-inf")).mul_(LN2)
        return out, lse
