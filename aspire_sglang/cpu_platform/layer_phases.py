"""Phases of a decoder layer between its products and its attention: norms, rotary embedding, gate.

Each is the work of a phase over rows; see :mod:`aspire_sglang.attention.program`. The argument is
the address of a ``LAYER``.
"""

from __future__ import annotations

import numpy as np
from numba import carray, njit

from aspire_sglang.attention import cpu_job
from aspire_sglang.attention.program import work
from aspire_sglang.attention.simd import (
    LANES,
    LOG2E,
    add,
    div,
    exp2,
    get_int64,
    lane_sum,
    load,
    minimum,
    mul,
    records,
    splat,
    store,
    sub,
)

#: A layer of one forward. Matrices are float32, contiguous, a row per token.
LAYER = np.dtype(
    [
        ("hidden", np.int64),  # width of the residual stream
        ("inner", np.int64),  # width of the MLP
        ("x", np.int64),  # [tokens, hidden]: output of the layer before
        ("before", np.int64),  # like x: residual stream before it, address 0 for none
        ("residual", np.int64),  # like x, written
        ("normed", np.int64),  # like x, scratch
        ("qkv", np.int64),  # [tokens, (num_heads + 2 * num_kv_heads) * dim], scratch
        ("projected", np.int64),  # like x, scratch
        ("gate_up", np.int64),  # [tokens, 2 * inner], scratch
        ("gated", np.int64),  # [tokens, inner], scratch
        ("norm_1", np.int64),  # [hidden]: weights of the norms
        ("norm_2", np.int64),
        ("eps_1", np.float32),
        ("eps_2", np.float32),
        ("positions", np.int64),  # int64 [tokens]
        ("cos_sin", np.int64),  # [positions, dim]: cosines of the first half, sines of the second
        ("slots", np.int64),  # int64 [tokens] of the KV pool
        ("attention", np.int64),  # address of a JOB of attention.cpu_job
    ]
)

_layers, _attention = records(LAYER), records(cpu_job.JOB)
_compiled = njit(error_model="numpy", nogil=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)


@_compiled
def _norm_row(job, row, x, before, weight, eps):
    """``residual = x + before`` and its root mean square norm (Zhang and Sennrich, 2019)."""
    width = job.hidden
    start = row * width
    squares = splat(np.float32(0))
    for i in range(0, width, LANES):
        value = load(x, start + i)
        if before != 0:
            value = add(value, load(before, start + i))
        store(job.residual, start + i, value)
        squares = add(squares, mul(value, value))
    mean = lane_sum(squares) / np.float32(width)
    factor = splat(np.float32(1) / np.sqrt(mean + eps))
    for i in range(0, width, LANES):
        value = mul(load(job.residual, start + i), factor)
        store(job.normed, start + i, mul(value, load(weight, i)))


@work
def norm_input(argument, row, thread):
    """Add a row of the layer's input to the residual stream, and normalise it."""
    job = carray(_layers(argument), 1)[0]
    _norm_row(job, row, job.x, job.before, job.norm_1, job.eps_1)


@work
def norm_attended(argument, row, thread):
    """Add a row of the projected attention to the residual stream, and normalise it."""
    job = carray(_layers(argument), 1)[0]
    _norm_row(job, row, job.projected, job.residual, job.norm_2, job.eps_2)


@_compiled
def _rotate(source, target, dim, cos_sin):
    """Rotary embedding of a head whose halves are the pairs' members (Su et al., 2021)."""
    half = dim // 2
    for i in range(0, half, LANES):
        cos, sin = load(cos_sin, i), load(cos_sin, half + i)
        first, second = load(source, i), load(source, half + i)
        store(target, i, sub(mul(first, cos), mul(second, sin)))
        store(target, half + i, add(mul(second, cos), mul(first, sin)))


@work
def place_token(argument, row, thread):
    """Rotate a token's queries to where the attention reads them, and its key; store its KV."""
    job = carray(_layers(argument), 1)[0]
    attention = carray(_attention(job.attention), 1)[0]
    dim, heads, kv_heads = attention.dim, attention.num_heads, attention.num_kv_heads
    source = job.qkv + 4 * row * (heads + 2 * kv_heads) * dim
    cos_sin = job.cos_sin + 4 * get_int64(job.positions, row) * dim
    slot = get_int64(job.slots, row)
    for head in range(heads):
        _rotate(source + 4 * head * dim, attention.q + 4 * (row * heads + head) * dim, dim, cos_sin)
    for head in range(kv_heads):
        at = 4 * (head * attention.num_slots + slot) * dim
        _rotate(source + 4 * (heads + head) * dim, attention.k + at, dim, cos_sin)
        value = source + 4 * (heads + kv_heads + head) * dim
        for i in range(0, dim, LANES):
            store(attention.v + at, i, load(value, i))


@work
def gate_row(argument, row, thread):
    """``silu(gate) * up`` of a row (Shazeer, 2020)."""
    job = carray(_layers(argument), 1)[0]
    gate = job.gate_up + 8 * row * job.inner
    one, limit = splat(np.float32(1)), splat(np.float32(126))
    for i in range(0, job.inner, LANES):
        value = load(gate, i)
        # Beyond 2^126 the result is 0, and exp2 ends.
        power = exp2(minimum(mul(value, splat(np.float32(-LOG2E))), limit))
        gated = div(value, add(one, power))
        store(job.gated, row * job.inner + i, mul(gated, load(gate, job.inner + i)))
