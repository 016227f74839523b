"""Mixed attention with FlashAttention 3, as ``sgl_kernel`` ships it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from aspire_sglang.attention.mixed import AttentionSpec, MixedStep, paged

# FlashAttention chooses the split of every row on the device for at most this many rows.
MAX_DYNAMIC_ROWS = 992
# With a schedule computed beforehand the library's own choice splits rows too little when a few
# long rows stand beside many short ones: 293 against 141 us at one verify row in nine, 24 x 30,000
# tokens on an H200. Rows that are all alike lose up to 4 % by a fixed number.
MIXED_SPLITS = 8

# With heads of 128 FlashAttention has a tile of 64 rows for calls whose longest row fits into it:
# queries times the query heads of a KV head. Draft rows take 64 instead of 74 us per layer, plain
# rows 753 instead of 903, at 24 x 30,000 tokens with 32/8 heads on an H200.
_SMALL_TILE = 64
_SMALL_TILE_HEAD = 128
# Shorter rows than these would be a high price for it.
_LEAST_QUERIES = 8

# The library cuts rows so that every processor gets about one piece. With these heads rows are cut
# as if there were so many times the processors: of the same rows, 143 instead of 145 us with one
# verify in nine, 690 instead of 741 with verifies alone, 64 as before with drafts alone. With heads
# of 64 it would be a loss.
_PIECES_PER_PROCESSOR = {128: 2}


def small_tile_queries(num_heads: int, num_kv_heads: int, head_dim: int) -> int | None:
    """Most queries of a row with which every call takes the small tile; None if it has no use."""
    queries = _SMALL_TILE // (num_heads // num_kv_heads)
    return queries if head_dim == _SMALL_TILE_HEAD and queries >= _LEAST_QUERIES else None


class Fa3MixedAttention:
    """``flash_attn_with_kvcache`` over a page table, as SGLang's ``fa3`` backend calls it.

    Args:
        num_splits: most pieces of a row's context; 0 lets the library choose, None is 0 for steps
            of single queries and ``MIXED_SPLITS`` for others.
        precompute: compute the tile schedule once per plan instead of once per layer.

    Raises:
        RuntimeError: if ``sgl_kernel`` or its FlashAttention library cannot be loaded.
        ValueError: if the pool's type is not that of the queries; the kernel reads 8-bit keys
            only with 8-bit queries.
    """

    name = "fa3"
    plans_on_host = False

    def __init__(
        self, spec: AttentionSpec, *, num_splits: int | None = None, precompute: bool = True
    ):
        if spec.kv_dtype != spec.dtype or spec.dtype not in (torch.bfloat16, torch.float16):
            raise ValueError(
                f"fa3: KV of {spec.kv_dtype} with queries of {spec.dtype} is not supported"
            )
        try:
            from sgl_kernel import flash_attn as library
        except Exception as error:  # a missing driver or symbol raises more than ImportError
            raise RuntimeError(
                f"fa3: sgl_kernel's FlashAttention 3 is not usable: {error}"
            ) from error
        self._library = library
        self.spec = spec
        self.num_splits = num_splits
        self.precompute = precompute
        pieces = _PIECES_PER_PROCESSOR.get(spec.head_dim, 1)
        processors = torch.cuda.get_device_properties().multi_processor_count
        # Processors to leave alone, in the library's words.
        self._margin = (1 - pieces) * processors

    def plan(self, step: MixedStep) -> Fa3MixedPlan:
        """Schedule the rows; only device work, so it may be captured."""
        metadata = None
        num_splits = self.num_splits
        if num_splits is None:
            num_splits = MIXED_SPLITS if step.max_seqlen_q > 1 else 0
        if self.precompute and step.num_rows <= MAX_DYNAMIC_ROWS:
            spec = self.spec
            metadata = self._library.get_scheduler_metadata(
                batch_size=step.num_rows,
                max_seqlen_q=step.max_seqlen_q,
                max_seqlen_k=step.page_table.shape[1] * spec.page_size,
                num_heads=spec.num_heads,
                num_heads_k=spec.num_kv_heads,
                headdim=spec.head_dim,
                cache_seqlens=step.cache_seqlens,
                qkv_dtype=spec.kv_dtype,
                cu_seqlens_q=step.cu_seqlens_q,
                page_size=spec.page_size,
                causal=True,
                has_softcap=spec.logit_cap > 0,
                num_splits=num_splits,
                sm_margin=self._margin,
            )
        return Fa3MixedPlan(self._library, self.spec, step, num_splits, metadata)


class Fa3MixedPlan:
    """A scheduled step; see ``MixedPlan``."""

    def __init__(
        self,
        library: Any,
        spec: AttentionSpec,
        step: MixedStep,
        num_splits: int,
        metadata: Tensor | None,
    ):
        self._library = library
        self._spec = spec
        self._step = step
        self._num_splits = num_splits
        self._metadata = metadata

    def over(self, page_table: Tensor) -> Fa3MixedPlan:
        # The schedule was made from lengths alone.
        step = replace(self._step, page_table=page_table)
        return Fa3MixedPlan(self._library, self._spec, step, self._num_splits, self._metadata)

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
        step, spec = self._step, self._spec
        if k_scale != 1.0 or v_scale != 1.0:
            raise ValueError(f"fa3: scales of KV are not supported for a pool of {spec.kv_dtype}")
        result = self._library.flash_attn_with_kvcache(
            q=q,
            k_cache=paged(k, spec.page_size),
            v_cache=paged(v, spec.page_size),
            page_table=step.page_table,
            cache_seqlens=step.cache_seqlens,
            cu_seqlens_q=step.cu_seqlens_q,
            max_seqlen_q=step.max_seqlen_q,
            softmax_scale=spec.scale,
            causal=True,
            softcap=spec.logit_cap,
            scheduler_metadata=self._metadata,
            num_splits=self._num_splits,
            return_softmax_lse=return_lse,
            out=out,
        )
        if not return_lse:
            return result, None
        # The library keeps one row of logs per head.
        return result[0], result[1].transpose(0, 1)
