"""The attention kernel of the CPU path: all rows of a step in one parallel region.

Work is a list of pieces: some query tokens of a row by a range of its keys. Pieces of one token go
to :mod:`aspire_sglang.attention.cpu_narrow` where the group of queries is small, all others to
:mod:`aspire_sglang.attention.cpu_flash`.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import carray

from aspire_sglang.attention.cpu_flash import attend_wide
from aspire_sglang.attention.cpu_job import JOB, KV_TYPES, MERGE, PIECE
from aspire_sglang.attention.cpu_narrow import narrow_kernel, takes_heads
from aspire_sglang.attention.program import work
from aspire_sglang.attention.simd import get, put, records

_jobs, _pieces, _merges = records(JOB), records(PIECE), records(MERGE)


@functools.cache
def attend_pieces(group: int, dim: int, kv_type: int) -> Any:
    """Compile the work of a phase for heads of this shape: one piece for one KV head.

    Its argument is the address of a ``JOB``, its items are ``num_pieces * num_kv_heads``.

    Args:
        group: query heads of a KV head.
        dim: width of a head.
        kv_type: index into ``KV_TYPES``.
    """
    attend_one = attend_wide
    if takes_heads(group, dim):
        attend_one = narrow_kernel(group, dim, KV_TYPES[kv_type])

    @work
    def attend(argument, item, thread):
        job = carray(_jobs(argument), 1)[0]
        piece = carray(_pieces(job.pieces), job.num_pieces)[item // job.num_kv_heads]
        scratch = job.scratch + 4 * thread * job.scratch_size
        if piece.tokens == 1:
            attend_one(job, piece, item % job.num_kv_heads, scratch)
        else:
            attend_wide(job, piece, item % job.num_kv_heads, scratch)

    return attend


@work
def merge_pieces(argument, item, thread):
    """Combine the partial results of some query tokens for one KV head.

    The phase after :func:`attend_pieces`: its argument is the same, its items are
    ``num_merges * num_kv_heads``.
    """
    job = carray(_jobs(argument), 1)[0]
    merges = carray(_merges(job.merges), job.num_merges)
    merge, head = merges[item // job.num_kv_heads], item % job.num_kv_heads
    dim = job.dim
    group = job.num_heads // job.num_kv_heads
    stride = job.num_kv_heads * job.partial_size
    for lane in range(merge.tokens * group):
        base = (merge.partial * job.num_kv_heads + head) * job.partial_size + lane * (dim + 2)
        best = get(job.partials, base)
        for part in range(1, merge.parts):
            best = max(best, get(job.partials, base + part * stride))
        row = (merge.token + lane // group) * job.num_heads + head * group + lane % group
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
