"""The attention kernel of the CPU path: one pass over keys and values for every row of a step.

The flash-attention recurrence (Dao et al., 2022; with the scores in base 2, as FlashAttention does)
over blocks of keys. The queries of a row that share a KV head (``tokens * group`` of them) are
the lanes of vectors, so both products are register-blocked and their operands stay in the first
caches. A block's keys and values are copied there from whatever slots they lie in, so scattered
page lists cost what contiguous contexts cost, and the next blocks are asked for meanwhile.

Work is a list of pieces: some query tokens of a row by a range of its keys. Each thread takes the
next (piece, KV head) until none is left.
"""

from __future__ import annotations

import math

import numpy as np
from numba import carray, cfunc, from_dtype, njit, types
from numba.extending import register_jitable

from aspire_sglang.attention.simd import (
    HIDDEN,
    LANES,
    add,
    div,
    exp2,
    fetch_add,
    get,
    get_int32,
    hide_behind,
    load,
    load_bfloat16,
    load_float16,
    maximum,
    minimum,
    mul,
    prefetch,
    product_tile,
    put,
    records,
    splat,
    store,
    sub,
)

#: Query lanes of a block: two vectors.
WIDTH = 2 * LANES
#: Keys of a block: keys, values and scores of one fit in the first-level cache (64 wide heads).
KEYS = 32
#: Keys between the one copied and the one asked for: two blocks.
_AHEAD = 64
_LINE = 64
# Keys, or value columns, of a register tile for blocks of one and of two vectors. Eight sums keep
# both FMA units busy; sixteen save loads, where thirty-two registers (AVX-512) leave room for them.
_TILE_1 = 8
_TILE_2 = 8 if LANES == 16 else 4
_LOG2E = math.log2(math.e)
FLOAT32, BFLOAT16, FLOAT16 = range(3)

#: Some query tokens of a row by a range of its keys.
PIECE = np.dtype(
    [
        ("token", np.int64),  # first query token in the flat batch
        ("tokens", np.int64),
        ("position", np.int64),  # of the first query token among the row's keys
        ("slots", np.int64),  # address of int32 slots of the row's keys, in layer 0
        ("layer_stride", np.int64),  # bytes from a layer's slots to the next one's, 0 if shared
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
        ("next", np.int64),  # counters, shared by the threads
        ("thread", np.int64),
        ("counters", np.int64),  # address of the two
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
        ("layer", np.int64),
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

_scores_1 = product_tile(_TILE_1, 1, WIDTH, accumulate=False)
_scores_2 = product_tile(_TILE_2, 2, WIDTH, accumulate=False)
_values_1 = product_tile(_TILE_1, 1, WIDTH, accumulate=True)
_values_2 = product_tile(_TILE_2, 2, WIDTH, accumulate=True)
_pieces, _merges = records(PIECE), records(MERGE)
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
            for offset in range(0, dim * size, _LINE):
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
def _cap(score, cap):
    """``cap * tanh(score / cap)``, from ``tanh(x) = 1 - 2 / (e^2x + 1)``."""
    double = mul(score, splat(np.float32(2 * _LOG2E) / cap))
    # Beyond 2^126 the result is the cap itself, and exp2 ends.
    power = exp2(minimum(double, splat(np.float32(126))))
    one = splat(np.float32(1))
    share = sub(one, div(splat(np.float32(2)), add(power, one)))
    return mul(splat(cap), share)


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
                score = _cap(score, job.cap)
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
def _attend_piece(job, piece, head, scratch):
    width = padded(job.dim)
    group = job.num_heads // job.num_kv_heads
    blocks = -(-piece.tokens * group // WIDTH)
    slots = piece.slots + job.layer * piece.layer_stride
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


@cfunc(types.void(types.CPointer(from_dtype(JOB))))
def attend_pieces(pointer):
    """A thread's share of a call; see :func:`aspire_sglang.attention.openmp.run_on_all_threads`."""
    job = carray(pointer, 1)[0]
    pieces = carray(_pieces(job.pieces), job.num_pieces)
    thread = fetch_add(job.counters + 8, 1)
    scratch = job.scratch + 4 * thread * job.scratch_size
    while True:
        item = fetch_add(job.counters, 1)
        if item >= job.num_pieces * job.num_kv_heads:
            break
        piece = pieces[item // job.num_kv_heads]
        _attend_piece(job, piece, item % job.num_kv_heads, scratch)


@_compiled
def _merge(job, merge, head):
    """Combine the partial results of some query tokens."""
    dim = job.dim
    group = job.num_heads // job.num_kv_heads
    stride = job.num_kv_heads * job.partial_size
    for item in range(merge.tokens * group):
        base = (merge.partial * job.num_kv_heads + head) * job.partial_size + item * (dim + 2)
        best = get(job.partials, base)
        for part in range(1, merge.parts):
            best = max(best, get(job.partials, base + part * stride))
        row = (merge.token + item // group) * job.num_heads + head * group + item % group
        total = np.float32(0)
        for d in range(dim):
            put(job.out, row * dim + d, np.float32(0))
        for part in range(merge.parts):
            at = base + part * stride
            share = np.float32(2) ** (get(job.partials, at) - best)
            total += share * get(job.partials, at + 1)
            for d in range(dim):
                value = get(job.out, row * dim + d) + share * get(job.partials, at + 2 + d)
                put(job.out, row * dim + d, value)
        for d in range(dim):
            put(job.out, row * dim + d, get(job.out, row * dim + d) / total)
        put(job.lse, row, best + np.float32(np.log2(total)))


@cfunc(types.void(types.CPointer(from_dtype(JOB))))
def merge_pieces(pointer):
    """A thread's share of combining partial results, after :func:`attend_pieces`."""
    job = carray(pointer, 1)[0]
    merges = carray(_merges(job.merges), job.num_merges)
    while True:
        item = fetch_add(job.counters, 1)
        if item >= job.num_merges * job.num_kv_heads:
            break
        _merge(job, merges[item // job.num_kv_heads], item % job.num_kv_heads)
