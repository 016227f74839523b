"""Mixed attention with this package's Triton kernel."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
import triton
from torch import Tensor

from aspire_sglang.attention.mixed import AttentionSpec, MixedStep, by_slot
from aspire_sglang.kernels.mixed_attention import attend, cut_into_pieces, merge

HEAD_DIMS = (64, 128)
LOG2E = math.log2(math.e)
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True)
class Launch:
    """Launch parameters.

    Attributes:
        block_n: context tokens per block.
        small_m, large_m: tile rows for rows with few and with many queries times heads.
        warps, stages: of the attention kernel.
        programs: pieces that the line of blocks is cut into; as many as run at the same time.
        min_share: least blocks of a piece, so that short steps are not cut to shreds.
    """

    block_n: int
    small_m: int
    large_m: int
    warps: int
    stages: int
    programs: int
    min_share: int = 4


def default_launch(spec: AttentionSpec, max_seqlen_q: int, num_sms: int) -> Launch:
    """Launch parameters for a step whose rows have at most ``max_seqlen_q`` queries.

    The best of a sweep on an H200 for 9 queries; as many programs as registers and shared memory
    let run at once, since one more wave of them costs as much as the first.
    """
    large_m = min(64, max(16, triton.next_power_of_2(max_seqlen_q * spec.group)))
    warps, stages = (2, 4) if spec.head_dim == 64 and large_m == 32 else (4, 3)
    per_sm = (3 if large_m == 64 else 4) if spec.head_dim == 64 else 2
    return Launch(
        block_n=64,
        small_m=16,
        large_m=large_m,
        warps=warps,
        stages=stages,
        programs=num_sms * per_sm,
    )


class TritonMixedAttention:
    """The Triton implementation; see ``MixedAttention``.

    Args:
        spec: shapes and types; 8-bit KV is widened to the type of the queries after loading.
        max_seqlen_q: most query tokens of a row in any step.
        device: of every tensor.
        launch: launch parameters; chosen from the shapes if None.

    Raises:
        ValueError: if the kernel does not support the head width or a type.
    """

    name = "triton"
    plans_on_host = False

    def __init__(
        self,
        spec: AttentionSpec,
        *,
        max_seqlen_q: int,
        device: torch.device | str = "cuda",
        launch: Launch | None = None,
    ):
        if spec.head_dim not in HEAD_DIMS:
            raise ValueError(f"triton: head width {spec.head_dim} is not one of {HEAD_DIMS}")
        if spec.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            raise ValueError(f"triton: queries of {spec.dtype} are not supported")
        if spec.kv_dtype != spec.dtype and spec.kv_dtype not in FLOAT8:
            raise ValueError(
                f"triton: KV of {spec.kv_dtype} with queries of {spec.dtype} is not supported"
            )
        self.spec = spec
        self.max_seqlen_q = max_seqlen_q
        self.launch = launch or default_launch(spec, max_seqlen_q, _num_sms(device))
        # Two unfinished rows per program, one at either end of its piece. Allocated here, so that
        # the memory is taken before the KV pool is sized; steps run one after the other.
        tiles = 2 * self.launch.programs * self.launch.large_m
        self.partial = torch.empty(tiles, spec.head_dim, dtype=torch.float32, device=device)
        self.partial_lse = torch.empty(tiles, dtype=torch.float32, device=device)

    def plan(self, step: MixedStep) -> TritonMixedPlan:
        """Cut the step into equal pieces; only device work, so it may be captured.

        Raises:
            ValueError: if rows may have more queries than announced.
        """
        if step.max_seqlen_q > self.max_seqlen_q:
            raise ValueError(
                f"triton: {step.max_seqlen_q} queries per row, at most {self.max_seqlen_q} "
                "announced"
            )
        launch, spec, rows = self.launch, self.spec, step.num_rows
        device = step.page_table.device
        row_blocks = torch.empty(rows + 1, dtype=torch.int32, device=device)
        # One more than programs: the last entry is the length of a piece.
        pieces = torch.empty(launch.programs + 1, dtype=torch.int32, device=device)
        cut_into_pieces[(1,)](
            step.cache_seqlens,
            step.cu_seqlens_q,
            row_blocks,
            pieces,
            rows,
            launch.programs,
            launch.min_share,
            GROUP=spec.group,
            KV_HEADS=spec.num_kv_heads,
            BLOCK_M=launch.large_m,
            BLOCK_N=launch.block_n,
            BLOCK_ROWS=triton.next_power_of_2(rows),
            BLOCK_PROGRAMS=16,
        )
        return TritonMixedPlan(self, step, row_blocks, pieces)


class TritonMixedPlan:
    """A step cut into pieces; see ``MixedPlan``."""

    def __init__(
        self, attention: TritonMixedAttention, step: MixedStep, row_blocks: Tensor, pieces: Tensor
    ):
        self._attention = attention
        self._step = step
        self._row_blocks = row_blocks
        self._pieces = pieces

    def over(self, page_table: Tensor) -> TritonMixedPlan:
        step = replace(self._step, page_table=page_table)
        return TritonMixedPlan(self._attention, step, self._row_blocks, self._pieces)

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
        attention, step = self._attention, self._step
        spec, launch = attention.spec, attention.launch
        k, v = by_slot(k), by_slot(v)
        out = torch.empty_like(q) if out is None else out
        if any(tensor.stride(-1) != 1 for tensor in (q, k, v, out)):
            raise ValueError("triton: the elements of a head must lie side by side")
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device) if return_lse else None
        shape = {
            "GROUP": spec.group,
            "DIM": spec.head_dim,
            "BLOCK_M": launch.large_m,
            "BLOCK_N": launch.block_n,
            "HAS_LSE": return_lse,
        }
        outputs = (
            out,
            lse if lse is not None else attention.partial_lse,
            attention.partial,
            attention.partial_lse,
            step.cache_seqlens,
            step.cu_seqlens_q,
            self._row_blocks,
            self._pieces,
        )
        strides = (out.stride(0), out.stride(1), lse.stride(0) if lse is not None else 0)
        attend[(launch.programs,)](
            q,
            k,
            v,
            step.page_table,
            *outputs,
            step.num_rows,
            launch.programs,
            spec.scale * k_scale * (1.0 if spec.logit_cap else LOG2E),
            spec.logit_cap,
            v_scale,
            q.stride(0),
            q.stride(1),
            k.stride(0),
            k.stride(1),
            v.stride(0),
            v.stride(1),
            step.page_table.stride(0),
            *strides,
            PAGE=spec.page_size,
            SMALL_M=launch.small_m,
            CAPPED=spec.logit_cap > 0,
            EXACT=spec.dtype == torch.float32,
            STAGES=launch.stages,
            num_warps=launch.warps,
            **shape,
        )
        tile = min(16, launch.large_m)
        queries = step.max_seqlen_q * spec.group
        merge[(step.num_rows, spec.num_kv_heads, triton.cdiv(queries, tile))](
            *outputs,
            launch.programs,
            *strides,
            TILE_M=tile,
            num_warps=4,
            **shape,
        )
        return out, lse


def _num_sms(device: torch.device | str) -> int:
    if torch.device(device).type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count
