"""Attention of one query token: the CPU kernel of draft rows and of plain decoding.

One token has only a few queries per KV head, too few to be the lanes of vectors. Here the lanes are
columns of the head: a key, or a value, is read once, from where it lies, and meets all queries of
its group in registers. The recurrence is that of :mod:`aspire_sglang.attention.cpu_flash`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from aspire_sglang.attention.cpu_job import cap_score
from aspire_sglang.attention.simd import (
    HIDDEN,
    LANES,
    add,
    exp2,
    get,
    lane_sum,
    largest,
    load,
    maximum,
    mul,
    put,
    splat,
    store,
    sub,
)
from aspire_sglang.attention.tiles import dot_tile, weigh_tile

# Queries of a group that pay; more of them fill a vector.
_MOST = 4
# Keys of a block.
_KEYS = 64
# Keys of a register tile: with their sums for three queries they fill sixteen registers.
_TILE = 4
_compiled = njit(error_model="numpy", nogil=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)


def takes_heads(queries: int, dim: int) -> bool:
    """Whether the kernel takes groups of ``queries`` heads of width ``dim``."""
    return queries <= _MOST and dim % LANES == 0


def narrow_kernel(queries: int, dim: int, kv_type: str) -> Any:
    """A function ``attend(job, piece, head, scratch)`` for pieces of one query token.

    Args:
        queries: query heads of a KV head, see :func:`takes_heads`.
        dim: width of a head.
        kv_type: ``"float32"``, ``"bfloat16"`` or ``"float16"``.
    """
    vectors = dim // LANES
    columns = 4 if vectors % 4 == 0 else 2 if vectors % 2 == 0 else 1
    size = 4 if kv_type == "float32" else 2
    score = dot_tile(queries, _TILE, dim, kv_type, _KEYS)
    weigh = weigh_tile(queries, columns, dim, kv_type, _KEYS)

    @_compiled
    def weights_of(job, row, state, count, votes):
        """Turn a query's scores of a block into weights; the factor of what was summed before."""
        if job.cap > 0:
            for j in range(0, count, LANES):
                store(row, j, cap_score(load(row, j), job.cap))
        for j in range(count, count + -count % LANES):
            put(row, j, np.float32(HIDDEN))
        before = load(state, 0)
        best = before
        for j in range(0, count, LANES):
            values = load(row, j)
            if votes != 0:
                store(votes, j, values)
            best = maximum(best, values)
        best = largest(best)
        factor = exp2(sub(before, best))
        store(state, 0, best)
        total = mul(load(state, LANES), factor)
        for j in range(0, count, LANES):
            weight = exp2(sub(load(row, j), best))
            store(row, j, weight)
            total = add(total, weight)
        store(state, LANES, total)
        return factor

    @_compiled
    def attend(job, piece, head, scratch):
        q = scratch
        out = q + 4 * queries * dim
        scores = out + 4 * queries * dim
        state = scores + 4 * queries * _KEYS
        factors = state + 4 * queries * 2 * LANES
        start = (piece.token * job.num_heads + head * queries) * dim
        scale = splat(job.scale)
        for d in range(0, queries * dim, LANES):
            store(q, d, mul(load(job.q, start + d), scale))
            store(out, d, splat(np.float32(0)))
        for g in range(queries):
            store(state, 2 * g * LANES, splat(np.float32(HIDDEN)))
            store(state, (2 * g + 1) * LANES, splat(np.float32(0)))
        slots = piece.slots + job.list * piece.list_stride
        keys = job.k + head * job.num_slots * dim * size
        values = job.v + head * job.num_slots * dim * size
        for first in range(piece.first, piece.stop, _KEYS):
            stop = min(first + _KEYS, piece.stop)
            for key in range(first, stop, _TILE):
                score(scores + 4 * (key - first), q, keys, slots, key, piece.stop)
            for g in range(queries):
                votes = np.int64(0)
                if piece.voters[0] >= 0:
                    votes = piece.votes[0] + 4 * ((head * queries + g) * job.votes_width + first)
                row, own = scores + 4 * g * _KEYS, state + 8 * g * LANES
                store(factors, g, weights_of(job, row, own, stop - first, votes))
            for d in range(0, dim, columns * LANES):
                weigh(
                    out + 4 * d,
                    scores,
                    values + size * d,
                    slots,
                    first,
                    stop - first,
                    piece.stop,
                    factors,
                )
        for g in range(queries):
            best = get(state, 2 * g * LANES)
            total = lane_sum(load(state, (2 * g + 1) * LANES))
            if piece.partial >= 0:
                number = piece.partial * job.num_kv_heads + head
                at = number * job.partial_size + g * (dim + 2)
                put(job.partials, at, best)
                put(job.partials, at + 1, total)
                for d in range(0, dim, LANES):
                    store(job.partials, at + 2 + d, load(out, g * dim + d))
            else:
                row = piece.token * job.num_heads + head * queries + g
                put(job.lse, row, best + np.float32(np.log2(total)))
                share = splat(np.float32(1) / total)
                for d in range(0, dim, LANES):
                    store(job.out, row * dim + d, mul(load(out, g * dim + d), share))

    return attend
