"""Mixed attention on the GPU: draft rows and verify rows of one forward in one varlen call.

A draft row is a row with one query token and a short page table, a verify row one with ``k + 1``
query tokens and the page table of its whole context; nothing else tells them apart. So an
implementation never hears of modes: it gets a page table, a length and a query range per row.

Everything is planned once per step and per page table, then run once per layer. All lengths are
device tensors, so that a captured CUDA graph serves every later step of the same row count.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Protocol

import torch
from torch import Tensor

PAGE_SIZES = (1, 16, 64)
NAMES = ("fa3", "triton", "flashinfer")


@dataclass(frozen=True)
class AttentionSpec:
    """What stays the same for every layer and step.

    Attributes:
        num_heads: query heads on this rank.
        num_kv_heads: KV heads on this rank; divides ``num_heads``.
        head_dim: width of one head, of keys and of values.
        page_size: tokens per page of the KV pool and of every page table.
        dtype: of queries and outputs.
        kv_dtype: of the KV pool.
        scale: factor of the logits, as a rule ``head_dim ** -0.5``; positive.
        logit_cap: logits become ``cap * tanh(logits / cap)``; 0 turns it off.

    Raises:
        ValueError: if the heads do not divide, or a value is outside of what any kernel supports.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    scale: float
    logit_cap: float = 0.0

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"{self.num_heads} query heads do not divide into {self.num_kv_heads} KV heads"
            )
        if self.page_size not in PAGE_SIZES:
            raise ValueError(f"page size {self.page_size} is not one of {PAGE_SIZES}")
        if not self.scale > 0:
            raise ValueError(f"the logit scale must be positive, not {self.scale}")

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True)
class HostLengths:
    """Copies of a step's lengths on the host, for implementations that plan there.

    Attributes:
        cache_seqlens: as in ``MixedStep``.
        cu_seqlens_q: as in ``MixedStep``.
    """

    cache_seqlens: list[int]
    cu_seqlens_q: list[int]


@dataclass(frozen=True)
class MixedStep:
    """The rows of one forward, on the device.

    Row ``i`` owns query tokens ``cu_seqlens_q[i] .. cu_seqlens_q[i + 1]``; they are the last ones
    of the ``cache_seqlens[i]`` tokens that its page table lists, and each sees the listed tokens
    up to itself. Keys carry their position, so a table may leave pages out.

    A row without query tokens is inert, whatever its table holds. Queries that see nothing, as in
    a row of length 0, get zeros and a log-sum-exp of minus infinity. Tokens that no row owns are
    not written.

    Attributes:
        page_table: ``[rows, width]`` int32, pages of each row in order of position.
        cache_seqlens: ``[rows]`` int32, listed tokens including the row's own queries.
        cu_seqlens_q: ``[rows + 1]`` int32, ascending from 0.
        max_seqlen_q: most query tokens of a row, a bound known to the host and fixed in a graph.
        host: the same lengths on the host, if they are known there.
    """

    page_table: Tensor
    cache_seqlens: Tensor
    cu_seqlens_q: Tensor
    max_seqlen_q: int
    host: HostLengths | None = None

    @property
    def num_rows(self) -> int:
        return self.page_table.shape[0]


class MixedPlan(Protocol):
    """One planned step; runs for any layer, and again after its page table changed in place."""

    def over(self, page_table: Tensor) -> MixedPlan:
        """The same rows, of the same lengths, over another page table of the same shape."""
        ...

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
        """Attention of one layer; the KV of the new tokens is already in the pool.

        Args:
            q: ``[T, Hq, D]``.
            k: ``[num_slots, Hkv, D]`` or ``[num_pages, page_size, Hkv, D]``, contiguous heads.
            v: as ``k``.
            out: ``[T, Hq, D]`` to write; a new tensor if None.
            k_scale: what a stored key is worth in units of ``q``; for 8-bit pools.
            v_scale: what a stored value is worth in units of ``out``.
            return_lse: also return the log-sum-exp of the scaled logits.

        Returns:
            ``out``, and the natural log-sum-exp ``[T, Hq]`` float32 (any strides) or None.
        """
        ...


class MixedAttention(Protocol):
    """One implementation.

    Attributes:
        name: as the configuration spells it.
        plans_on_host: ``plan`` reads lengths on the host and must stay outside a captured graph:
            before every replay, one ``plan`` of the same shape updates the captured buffers.
    """

    name: str
    plans_on_host: bool

    def plan(self, step: MixedStep) -> MixedPlan: ...


def default_mixed_attention(spec: AttentionSpec) -> str:
    """The implementation that is fastest here, by name.

    On an H200, one verify row of nine among draft rows takes 80 us with ``fa3`` and 81 with
    ``triton`` at 256 x 7,000 tokens (9/3 heads of 64), and 140 and 154 us at 24 x 30,000 (32/8
    heads of 128); steps of one kind alone are up to 1.3 times as fast with ``triton``. FlashInfer
    gives every row the tile of the longest, and takes 2.7 to 3.6 times as long. So ``fa3`` where
    it can run: on Hopper, with a 16-bit pool.
    """
    usable = spec.kv_dtype == spec.dtype and spec.dtype in (torch.bfloat16, torch.float16)
    if usable and torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9:
        return "fa3" if find_spec("sgl_kernel") else "triton"
    return "triton"


def create_mixed_attention(
    name: str,
    spec: AttentionSpec,
    *,
    max_seqlen_q: int,
    device: torch.device | str = "cuda",
) -> MixedAttention:
    """The implementation of this name.

    Raises:
        ValueError: for an unknown name, or a spec that the kernel does not support.
        RuntimeError: if the library behind it is not usable here.
    """
    if name == "fa3":
        from aspire_sglang.attention.fa3_mixed import Fa3MixedAttention

        return Fa3MixedAttention(spec)
    if name == "triton":
        from aspire_sglang.attention.triton_mixed import TritonMixedAttention

        return TritonMixedAttention(spec, max_seqlen_q=max_seqlen_q, device=device)
    if name == "flashinfer":
        from aspire_sglang.attention.flashinfer_mixed import FlashInferMixedAttention

        return FlashInferMixedAttention(spec, device=device)
    raise ValueError(f"unknown mixed attention {name!r}; known are {', '.join(NAMES)}")


def paged(pool: Tensor, page_size: int) -> Tensor:
    """A KV pool as ``[num_pages, page_size, Hkv, D]``, without a copy."""
    if pool.dim() == 4:
        return pool
    return pool.view(-1, page_size, *pool.shape[1:])


def by_slot(pool: Tensor) -> Tensor:
    """A KV pool as ``[num_slots, Hkv, D]``, without a copy."""
    return pool.view(-1, *pool.shape[2:]) if pool.dim() == 4 else pool
