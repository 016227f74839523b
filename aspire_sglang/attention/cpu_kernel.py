"""The attention kernel of the CPU path: all rows of a step in one parallel region.

Work is a list of pieces: some query tokens of a row by a range of its keys. Each thread takes the
next (piece, KV head) until none is left. Pieces of one token go to
:mod:`aspire_sglang.attention.cpu_narrow` where the group of queries is small, all others to
:mod:`aspire_sglang.attention.cpu_flash`.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import carray, cfunc, from_dtype, njit, types

from aspire_sglang.attention.cpu_flash import attend_wide
from aspire_sglang.attention.cpu_job import JOB, KV_TYPES, MERGE, PIECE
from aspire_sglang.attention.cpu_narrow import narrow_kernel, takes_heads
from aspire_sglang.attention.simd import fetch_add, get, put, records

_pieces, _merges = records(PIECE), records(MERGE)
_compiled = njit(error_model="numpy", nogil=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)


@functools.cache
def attend_pieces(group: int, dim: int, kv_type: int) -> Any:
    """Compile the kernel for heads of this shape.

    Args:
        group: query heads of a KV head.
        dim: width of a head.
        kv_type: index into ``KV_TYPES``.

    Returns:
        A Numba ``cfunc``, a thread's share of a call; see
        :func:`aspire_sglang.attention.openmp.run_on_all_threads`.
    """
    attend_one = attend_wide
    if takes_heads(group, dim):
        attend_one = narrow_kernel(group, dim, KV_TYPES[kv_type])

    @cfunc(types.void(types.CPointer(from_dtype(JOB))))
    def attend(pointer):
        job = carray(pointer, 1)[0]
        pieces = carray(_pieces(job.pieces), job.num_pieces)
        thread = fetch_add(job.counters + 8, 1)
        scratch = job.scratch + 4 * thread * job.scratch_size
        while True:
            item = fetch_add(job.counters, 1)
            if item >= job.num_pieces * job.num_kv_heads:
                break
            piece = pieces[item // job.num_kv_heads]
            if piece.tokens == 1:
                attend_one(job, piece, item % job.num_kv_heads, scratch)
            else:
                attend_wide(job, piece, item % job.num_kv_heads, scratch)

    return attend


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
