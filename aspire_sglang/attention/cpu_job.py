"""Records that the CPU attention kernels are called with."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numba import njit

from aspire_sglang.attention.simd import LOG2E, add, div, exp2, minimum, mul, splat, sub

#: Types of a KV pool, by number.
KV_TYPES = ("float32", "bfloat16", "float16")
FLOAT32, BFLOAT16, FLOAT16 = range(3)

#: Some query tokens of a row by a range of its keys.
PIECE = np.dtype(
    [
        ("token", np.int64),  # first query token in the flat batch
        ("tokens", np.int64),
        ("position", np.int64),  # of the first query token among the row's keys
        ("slots", np.int64),  # address of int32 slots of the row's keys, list 0
        ("list_stride", np.int64),  # bytes from a list of slots to the next, 0 if there is one
        ("first", np.int64),  # keys first .. stop
        ("stop", np.int64),
        (
            "partial",
            np.int64,
        ),  # number among the partial results, -1 if the piece is all
        ("voters", np.int64, (2,)),  # token of the piece that votes, or -1
        (
            "votes",
            np.int64,
            (2,),
        ),  # address of its scores, float32 [heads, votes_width]
    ]
)
#: Query tokens whose keys were shared out among pieces.
MERGE = np.dtype(
    [
        ("token", np.int64),
        ("tokens", np.int64),
        ("partial", np.int64),  # the first of consecutive partial results
        ("parts", np.int64),
    ]
)
#: One call of the kernel: every layer fills in its tensors.
JOB = np.dtype(
    [
        ("pieces", np.int64),  # address of PIECE [num_pieces]
        ("num_pieces", np.int64),
        ("merges", np.int64),  # address of MERGE [num_merges]
        ("num_merges", np.int64),
        ("q", np.int64),  # float32 [T, num_heads, dim]
        ("out", np.int64),  # like q
        ("lse", np.int64),  # float32 [T, num_heads], base 2
        ("partials", np.int64),  # float32 [partials, num_kv_heads, partial_size]
        (
            "partial_size",
            np.int64,
        ),  # lanes * (dim + 2): largest score, sum and output of each
        ("k", np.int64),  # [num_kv_heads, num_slots, dim]
        ("v", np.int64),
        ("kv_type", np.int64),
        ("num_slots", np.int64),
        ("list", np.int64),  # of slots, which the layer reads
        ("num_heads", np.int64),
        ("num_kv_heads", np.int64),
        ("dim", np.int64),
        ("scratch", np.int64),  # float32 [threads, scratch_size]
        ("scratch_size", np.int64),
        ("votes_width", np.int64),
        ("scale", np.float32),  # with log2(e)
        ("cap", np.float32),  # with log2(e); 0 for none
    ]
)


_compiled = njit(error_model="numpy", nogil=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)


@_compiled
def cap_score(score, cap):
    """``cap * tanh(score / cap)``, from ``tanh(x) = 1 - 2 / (e^2x + 1)``."""
    double = mul(score, splat(np.float32(2 * LOG2E) / cap))
    # Beyond 2^126 the result is the cap itself, and exp2 ends.
    power = exp2(minimum(double, splat(np.float32(126))))
    one = splat(np.float32(1))
    share = sub(one, div(splat(np.float32(2)), add(power, one)))
    return mul(splat(cap), share)


def write_scales(jobs: np.ndarray, scaling: Sequence[float], caps: Sequence[float]) -> None:
    """Write the factor of the scores, and their cap, 0 for none, of ``JOB`` records."""
    jobs["scale"] = np.multiply(scaling, LOG2E)
    jobs["cap"] = np.multiply(caps, LOG2E)
