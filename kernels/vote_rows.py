"""Which queries of a ragged batch vote for the pages of which context, and how the kernels that
read keys for them are launched."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

VOTERS = 2
"""Most voters per context: first and last query of a verify row, the only one of a draft row."""


@dataclass(frozen=True)
class VoteRows:
    """``R`` contexts and the queries that vote for their pages.

    A context is read once for all its voters. Everything lives on the device, so a captured graph
    serves every batch of at most ``R`` contexts.

    Attributes:
        slots: ``[R]`` int, row of the request table; negative rows are padding and inert.
        voters: ``[R, 2]`` int, query tokens of the flat batch; -1 for no voter. The voters of a
            context count equally.
        positions: ``[T]`` int, position of each query token: the last one that it sees.
    """

    slots: Tensor
    voters: Tensor
    positions: Tensor

    def __post_init__(self) -> None:
        if self.slots.dim() != 1 or self.voters.shape != (self.slots.shape[0], VOTERS):
            raise ValueError(
                f"slots {tuple(self.slots.shape)} and voters {tuple(self.voters.shape)} must be "
                f"[R] and [R, {VOTERS}]"
            )
        if self.positions.dim() != 1:
            raise ValueError(f"positions must be [T], got {tuple(self.positions.shape)}")
        for name in ("slots", "voters", "positions"):
            tensor: Tensor = getattr(self, name)
            if tensor.dtype not in (torch.int32, torch.int64) or not tensor.is_contiguous():
                raise ValueError(f"{name} must be contiguous int32 or int64")


@dataclass(frozen=True)
class KeyScan:
    """Launch parameters of a pass over keys.

    Attributes:
        block: tokens per tile, a power of two.
        warps: warps per program.
        stages: depth of the software pipeline over KV heads.
        programs: programs aimed at in all; a context is split among ``programs / R`` of them.
    """

    block: int = 128
    warps: int = 4
    stages: int = 3
    programs: int = 8192

    def splits(self, rows: int, tokens: int) -> int:
        """Programs per context of at most ``tokens`` tokens, at least 1."""
        return max(1, min(self.programs // max(rows, 1), -(-tokens // self.block)))


def check_keys(
    q: Tensor, k: Tensor, req_to_token: Tensor, rows: VoteRows, page_size: int, block: int
) -> None:
    """Refuse arguments of a pass over keys that the kernels cannot take.

    Raises:
        ValueError: naming the argument.
    """
    if q.dim() != 3 or k.dim() != 3 or q.shape[2] != k.shape[2]:
        raise ValueError(
            f"q {tuple(q.shape)} and k {tuple(k.shape)} must be [T, Hq, D] and [slots, Hkv, D]"
        )
    heads, kv_heads, dim = q.shape[1], k.shape[1], q.shape[2]
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads do not share {kv_heads} KV heads evenly")
    if dim < 16 or dim & (dim - 1):
        raise ValueError(f"the head dimension must be a power of two from 16 on, got {dim}")
    if q.dtype != k.dtype or q.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise ValueError(
            f"q is {q.dtype} and k {k.dtype}; both must be float16, bfloat16 or float32"
        )
    if q.stride(2) != 1 or k.stride(2) != 1:
        raise ValueError("the head dimension of q and k must be contiguous")
    if rows.positions.shape[0] != q.shape[0]:
        raise ValueError(f"{rows.positions.shape[0]} positions for {q.shape[0]} query tokens")
    check_table(req_to_token)
    if page_size < 1 or page_size & (page_size - 1) or page_size > block:
        raise ValueError(f"page_size must be a power of two up to {block}, got {page_size}")


def check_table(req_to_token: Tensor) -> None:
    """
    Raises:
        ValueError: if the request table is not ``[rows, width]`` int32 with contiguous rows.
    """
    if req_to_token.dim() != 2 or req_to_token.dtype != torch.int32 or req_to_token.stride(1) != 1:
        raise ValueError("req_to_token must be [rows, width] int32 with contiguous rows")


def head_columns(group: int) -> int:
    """Columns of a score tile per voter: a tensor-core tile is 8 wide, for two voters."""
    return max(4, 1 << (group - 1).bit_length())
