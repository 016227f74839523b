"""Attention of several query tokens by a range of keys: the CPU kernel of verify rows and prefills.

The flash-attention recurrence (Dao et al., 2022; with the scores in base 2, as FlashAttention does)
over blocks of keys. The queries of a row that share a KV head (``tokens * group`` of them) are
the lanes of vectors, so both products are register-blocked and their operands stay in the first
caches. A block's keys and values are copied there from whatever slots they lie in, so scattered
page lists cost what contiguous contexts cost, and the next blocks are asked for meanwhile.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numba.extending import register_jitable

from aspire_sglang.attention.cpu_job import BFLOAT16, FLOAT32, cap_score
from aspire_sglang.attention.simd import (
    HIDDEN,
    LANES,
    add,
    exp2,
    get,
    get_int32,
    hide_behind,
    load,
    load_bfloat16,
    load_float16,
    maximum,
    mul,
    prefetch,
    put,
    splat,
    store,
    sub,
)
from aspire_sglang.attention.tiles import LINE, product_tile

#: Query lanes of a block: two vectors.
WIDTH = 2 * LANES
#: Keys of a block: keys, values and scores of one fit in the first-level cache (64 wide heads).
KEYS = 32
#: Keys between the one copied and the one asked for: two blocks.
_AHEAD = 64
# Keys, or value columns, of a register tile for blocks of one and of two vectors. Eight sums keep
# both FMA units busy; sixteen save loads, where thirty-two registers (AVX-512) leave room for them.
_TILE_1 = 8
_TILE_2 = 8 if LANES == 16 else 4

_scores_1 = product_tile(_TILE_1, 1, WIDTH, accumulate=False)
_scores_2 = product_tile(_TILE_2, 2, WIDTH, accumulate=False)
_values_1 = product_tile(_TILE_1, 1, WIDTH, accumulate=True)
_values_2 = product_tile(_TILE_2, 2, WIDTH, accumulate=True)
_compiled = njit(error_model="numpy", nogil=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)


@register_jitable
def padded(dim: int) -> int:
    """Columns that a head of ``dim`` takes in scratch memory."""
    return -(-dim // LANES) * LANES


def scratch_size(dim: int, blocks: int) -> int:
    """float32 values of scratch memory per thread for pieces of so many query blocks."""
    queries, state = padded(dim) * WIDTH, (4 + padded(dim)) * WIDTH
    return 2 * KEYS * padded(dim) + KEYS * WIDTH + blocks * (queries + state)


@_compiled
def _copy_block(job, pool, head, slots, first, count, stop, target):
    """Copy ``count`` rows of a pool to ``target [KEYS, padded dim]``, padding with zeros."""
    dim = job.dim
    width = padded(dim)
    size = 4 if job.kv_type == FLOAT32 else 2
    base = pool + head * job.num_slots * dim * size
    whole = dim - dim % LANES
    for i in range(count):
        if first + i + _AHEAD < stop:
            ahead = base + get_int32(slots, first + i + _AHEAD) * dim * size
            for offset in range(0, dim * size, LINE):
                prefetch(ahead, offset)
        row = base + get_int32(slots, first + i) * dim * size
        at = i * width
        if job.kv_type == FLOAT32:
            for d in range(0, whole, LANES):
                store(target, at + d, load(row, d))
            for d in range(whole, dim):
                put(target, at + d, get(row, d))
        elif job.kv_type == BFLOAT16:
            for d in range(0, whole, LANES):
                store(target, at + d, load_bfloat16(row, d))
        else:
            for d in range(0, whole, LANES):
                store(target, at + d, load_float16(row, d))
        for d in range(dim, width):
            put(target, at + d, np.float32(0))


@_compiled
def _start_block(job, piece, head, block, queries, state):
    """Lay out the queries ``[dim, WIDTH]`` and the state of a block.

    The state is ``[4 + padded dim, WIDTH]``: last visible position, largest score, sum, factor of
    the old sum, and the output.
    """
    dim = job.dim
    group = job.num_heads // job.num_kv_heads
    lanes = piece.tokens * group
    for lane in range(WIDTH):
        item = block * WIDTH + lane
        token = min(item, lanes - 1) // group
        put(state, lane, np.float32(piece.position + token))
        row = ((piece.token + token) * job.num_heads + head * group + item % group) * dim
        for d in range(dim):
            value = get(job.q, row + d) * job.scale if item < lanes else np.float32(0)
            put(queries, d * WIDTH + lane, value)
    for at in range(0, WIDTH, LANES):
        store(state, WIDTH + at, splat(np.float32(HIDDEN)))
    for at in range(2 * WIDTH, (4 + padded(dim)) * WIDTH, LANES):
        store(state, at, splat(np.float32(0)))


@_compiled
def _vote(job, piece, head, block, scores, first, count):
    """Hand out the scores of the voting tokens of a block."""
    group = job.num_heads // job.num_kv_heads
    for n in range(2):
        if piece.voters[n] < 0:
            continue
        for g in range(group):
            lane = piece.voters[n] * group + g - block * WIDTH
            if 0 <= lane < WIDTH:
                row = (head * group + g) * job.votes_width + first
                for j in range(count):
                    put(piece.votes[n], row + j, get(scores, j * WIDTH + lane))


@_compiled
def _attend_block(job, piece, head, block, queries, state, keys, values, scores, first, count):
    """One step of the recurrence: a block of queries by a block of keys."""
    dim = job.dim
    width = padded(dim)
    group = job.num_heads // job.num_kv_heads
    one_vector = piece.tokens * group - block * WIDTH <= LANES
    vectors = 1 if one_vector else 2
    if one_vector:
        for j in range(0, count, _TILE_1):
            _scores_1(scores + 4 * j * WIDTH, keys + 4 * j * width, width, 1, queries, dim, 0)
    else:
        for j in range(0, count, _TILE_2):
            _scores_2(scores + 4 * j * WIDTH, keys + 4 * j * width, width, 1, queries, dim, 0)
    some_hidden = first + count > piece.position
    for at in range(0, vectors * LANES, LANES):
        last, before = load(state, at), load(state, WIDTH + at)
        best = before
        for j in range(count):
            score = load(scores, j * WIDTH + at)
            if job.cap > 0:
                score = cap_score(score, job.cap)
            if some_hidden:
                score = hide_behind(score, last, np.float32(first + j))
            if job.cap > 0 or some_hidden:
                store(scores, j * WIDTH + at, score)
            best = maximum(best, score)
        store(state, WIDTH + at, best)
        store(state, 3 * WIDTH + at, exp2(sub(before, best)))
    if piece.voters[0] >= 0:
        _vote(job, piece, head, block, scores, first, count)
    for at in range(0, vectors * LANES, LANES):
        best = load(state, WIDTH + at)
        total = mul(load(state, 2 * WIDTH + at), load(state, 3 * WIDTH + at))
        for j in range(count):
            weight = exp2(sub(load(scores, j * WIDTH + at), best))
            store(scores, j * WIDTH + at, weight)
            total = add(total, weight)
        store(state, 2 * WIDTH + at, total)
    factor, sums = state + 4 * 3 * WIDTH, state + 4 * 4 * WIDTH
    if one_vector:
        for d in range(0, width, _TILE_1):
            _values_1(sums + 4 * d * WIDTH, values + 4 * d, 1, width, scores, count, factor)
    else:
        for d in range(0, width, _TILE_2):
            _values_2(sums + 4 * d * WIDTH, values + 4 * d, 1, width, scores, count, factor)


@_compiled
def _finish_block(job, piece, head, block, state):
    """Write the output of a block, or its state if other pieces have the rest of the keys."""
    dim = job.dim
    group = job.num_heads // job.num_kv_heads
    lanes = piece.tokens * group
    for lane in range(min(WIDTH, lanes - block * WIDTH)):
        item = block * WIDTH + lane
        best, total = get(state, WIDTH + lane), get(state, 2 * WIDTH + lane)
        if piece.partial >= 0:
            number = piece.partial * job.num_kv_heads + head
            at = number * job.partial_size + item * (dim + 2)
            put(job.partials, at, best)
            put(job.partials, at + 1, total)
            for d in range(dim):
                put(job.partials, at + 2 + d, get(state, (4 + d) * WIDTH + lane))
        else:
            row = (piece.token + item // group) * job.num_heads + head * group + item % group
            put(job.lse, row, best + np.float32(np.log2(total)))
            for d in range(dim):
                put(job.out, row * dim + d, get(state, (4 + d) * WIDTH + lane) / total)


@_compiled
def attend_wide(job, piece, head, scratch):
    """Attend from one piece of work; ``scratch`` is this thread's memory."""
    width = padded(job.dim)
    group = job.num_heads // job.num_kv_heads
    blocks = -(-piece.tokens * group // WIDTH)
    slots = piece.slots + job.list * piece.list_stride
    keys = scratch
    values = keys + 4 * KEYS * width
    scores = values + 4 * KEYS * width
    queries = scores + 4 * KEYS * WIDTH
    query_size = 4 * width * WIDTH
    state = queries + blocks * query_size
    state_size = 4 * (4 + width) * WIDTH
    for block in range(blocks):
        _start_block(
            job,
            piece,
            head,
            block,
            queries + block * query_size,
            state + block * state_size,
        )
    for first in range(piece.first, piece.stop, KEYS):
        count = min(KEYS, piece.stop - first)
        _copy_block(job, job.k, head, slots, first, count, piece.stop, keys)
        _copy_block(job, job.v, head, slots, first, count, piece.stop, values)
        for block in range(blocks):
            _attend_block(
                job,
                piece,
                head,
                block,
                queries + block * query_size,
                state + block * state_size,
                keys,
                values,
                scores,
                first,
                count,
            )
    for block in range(blocks):
        _finish_block(job, piece, head, block, state + block * state_size)
