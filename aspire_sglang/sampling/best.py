"""The best token of each row of logits and its probability, in one kernel of the CPU path."""

from __future__ import annotations

import numpy as np
import torch
from numba import carray
from torch import Tensor

from aspire_sglang.attention.program import Program, work
from aspire_sglang.attention.simd import (
    LANES,
    LOG2E,
    add,
    exp2,
    first_lane,
    get,
    lane_sum,
    largest,
    load,
    maximum,
    mul,
    put,
    put_int64,
    records,
    splat,
    sub,
)

_CALL = np.dtype(
    [
        ("logits", np.int64),  # address of float32 [rows, width]
        ("width", np.int64),
        ("tokens", np.int64),  # of the results, int64 [rows]
        ("probabilities", np.int64),  # and float32 [rows]
    ]
)
_calls = records(_CALL)


@work
def _best_of_row(argument, row, thread):
    call = carray(_calls(argument), 1)[0]
    logits, width = call.logits + 4 * row * call.width, call.width
    whole = width - width % LANES
    best = splat(np.float32(-np.inf))
    for i in range(0, whole, LANES):
        best = maximum(best, load(logits, i))
    top = first_lane(largest(best))
    for i in range(whole, width):
        top = max(top, get(logits, i))
    token = 0
    while token < width - 1 and get(logits, token) != top:
        token += 1
    shift, scale, total = splat(top), splat(np.float32(LOG2E)), splat(np.float32(0))
    for i in range(0, whole, LANES):
        total = add(total, exp2(mul(sub(load(logits, i), shift), scale)))
    mass = lane_sum(total)
    for i in range(whole, width):
        mass += np.exp(get(logits, i) - top)
    put_int64(call.tokens, row, token)
    put(call.probabilities, row, np.float32(1) / mass)


def best_tokens(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Argmax of each row, the first of equals, and its softmax probability.

    Args:
        logits: float32 ``[n, V]`` on the CPU.

    Returns:
        int64 ``[n]`` and float32 ``[n]``.
    """
    logits = logits.float().contiguous()
    rows, width = logits.shape
    tokens, probabilities = torch.empty(rows, dtype=torch.int64), torch.empty(rows)
    call = np.zeros(1, _CALL)
    call["logits"], call["width"] = logits.data_ptr(), width
    call["tokens"], call["probabilities"] = tokens.data_ptr(), probabilities.data_ptr()
    program = Program(_best_of_row)
    program.argument[0], program.items[0] = call.ctypes.data, rows
    program.run()
    return tokens, probabilities
