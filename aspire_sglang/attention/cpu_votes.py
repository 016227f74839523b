"""Page scores from the attention scores of voting queries: the kernel of the CPU path.

A token's score is the reduction over query heads of its softmax probability, averaged over the
voting queries of a row; a page's score is the sum over its tokens.
"""

from __future__ import annotations

import numpy as np
from numba import carray, njit

from aspire_sglang.attention.program import work
from aspire_sglang.attention.simd import (
    LANES,
    add,
    exp2,
    get,
    load,
    maximum,
    mul,
    put,
    records,
    splat,
    store,
    sub,
)

REDUCTIONS = ("max", "mean", "sum")
_MAX, _MEAN, _ = range(3)
#: Tokens scored at a time.
_BLOCK = 256

#: A row that votes.
BALLOT = np.dtype(
    [
        ("length", np.int64),  # keys of the row
        ("voters", np.int64),  # 1 or 2
        ("votes", np.int64, (2,)),  # address of a voter's scores, float32 [heads, width], base 2
        ("lse", np.int64, (2,)),  # address of its log-sum-exp, float32 [heads], base 2
        ("pages", np.int64),  # address of the result, float32 [ceil(length / page_size)]
    ]
)
COUNT = np.dtype(
    [
        ("ballots", np.int64),  # address of BALLOT records
        ("num_heads", np.int64),
        ("width", np.int64),
        ("page_size", np.int64),
        ("reduction", np.int64),
    ]
)
_ballots, _counts = records(BALLOT), records(COUNT)
_compiled = njit(error_model="numpy", nogil=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)


@_compiled
def _token_scores(count, ballot, first):
    """``LANES`` token scores from position ``first`` on."""
    mean = splat(np.float32(0))
    for voter in range(ballot.voters):
        votes, lse = ballot.votes[voter], ballot.lse[voter]
        score = splat(np.float32(0))
        for head in range(count.num_heads):
            logit = load(votes, head * count.width + first)
            share = exp2(sub(logit, splat(get(lse, head))))
            score = maximum(score, share) if count.reduction == _MAX else add(score, share)
        mean = add(mean, score)
    weight = np.float32(1) / np.float32(ballot.voters)
    if count.reduction == _MEAN:
        weight /= np.float32(count.num_heads)
    return mul(mean, splat(weight))


@_compiled
def _score_pages(count, ballot, scratch):
    for page in range(-(-ballot.length // count.page_size)):
        put(ballot.pages, page, np.float32(0))
    for first in range(0, ballot.length, _BLOCK):
        tokens = min(_BLOCK, ballot.length - first)
        for at in range(0, tokens, LANES):
            store(scratch, at, _token_scores(count, ballot, first + at))
        for at in range(tokens):
            page = (first + at) // count.page_size
            put(ballot.pages, page, get(ballot.pages, page) + get(scratch, at))


@work
def score_pages(argument, item, thread):
    """The work of a phase: a row's page scores; its argument is the address of a ``COUNT``."""
    count = carray(_counts(argument), 1)[0]
    scratch = np.empty(_BLOCK, dtype=np.float32)
    _score_pages(count, carray(_ballots(count.ballots), item + 1)[item], scratch.ctypes.data)
