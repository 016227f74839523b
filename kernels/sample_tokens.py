"""One token per query token of a mixed step: the argmax, or a sample that draft and target share.

A sample is ``argmax(logit / T - log e)`` with one exponential variate ``e`` per token of the
vocabulary (the Gumbel-max trick). It needs no softmax, no sum, no sort: logits are read once.
The variates are a function of (key of the request, position, token), so the draft of a position and
its verification meet the same ones: where their distributions are close they pick the same token.
What is emitted is always the target's own sample, and noise of different positions is independent,
so the text follows the target's distribution whatever was drafted.

The variates come from Philox4x32 (Salmon et al. 2011), with the request's key as its key and
(position, token) as its counter. Each takes 64 bits: with 32, tokens of probability below 1e-8
would win too often or never.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from aspire_sglang.kernels.page_selection import check_rows

_BLOCK = 2048
"""Tokens of the vocabulary per step of a program. It decides which random bits a token gets, so it
must not depend on the launch."""

_PROGRAMS = 1024


def vocab_splits(rows: int, vocab: int) -> int:
    """Programs that share the vocabulary of one row, enough to fill the device."""
    return max(1, min(_PROGRAMS // max(rows, 1), triton.cdiv(vocab, _BLOCK)))


def partial_size(tokens: int) -> int:
    """Entries of the scratch memory for at most ``tokens`` query tokens."""
    return _PROGRAMS + tokens


def sample_tokens(
    logits: Tensor,
    token_row: Tensor,
    positions: Tensor,
    temperature: Tensor,
    key_low: Tensor,
    key_high: Tensor,
    partial: Tensor,
    tokens: Tensor,
) -> None:
    """Choose the next token after each query token. May be captured.

    Args:
        logits: ``[T, V]`` float of any precision, rows contiguous. -inf is never chosen where
            another token is possible.
        token_row: ``[T]`` int row that owns the query token; negative tokens are padding.
        positions: ``[T]`` int position of the query token in its text: with the row's key, the name
            of the noise.
        temperature: ``[R]`` float32 per row; 0 takes the argmax, of equals the lowest token.
        key_low, key_high: ``[R]`` int32, the two halves of the row's 64-bit key.
        partial: int64 scratch of at least ``partial_size(T)`` entries.
        tokens: ``[T]`` int64 to write to; padding tokens become 0.

    Raises:
        ValueError: shapes that do not fit.
    """
    if logits.dim() != 2 or logits.stride(1) != 1:
        raise ValueError(f"logits must be [T, V] with contiguous rows, got {tuple(logits.shape)}")
    count, vocab = logits.shape
    rows = temperature.shape[0]
    check_rows(count, token_row=token_row, positions=positions, tokens=tokens)
    check_rows(rows, key_low=key_low, key_high=key_high)
    if temperature.dtype != torch.float32 or not temperature.is_contiguous():
        raise ValueError("temperature must be [R] contiguous float32")
    splits = vocab_splits(count, vocab)
    if partial.dtype != torch.int64 or partial.numel() < count * splits:
        raise ValueError(f"partial must hold {count * splits} int64, got {partial.numel()}")
    if not count:
        return
    _best_of_splits_kernel[(count, splits)](
        logits,
        token_row,
        positions,
        temperature,
        key_low,
        key_high,
        partial,
        logits.stride(0),
        vocab,
        BLOCK=_BLOCK,
        num_warps=4,
    )
    _best_kernel[(count,)](
        partial,
        token_row,
        tokens,
        splits,
        SPLITS=max(triton.next_power_of_2(splits), 2),
        num_warps=1,
    )


@triton.jit
def exponential(high, low):
    """Exp(1) variates from two words of random bits each, exact to float32 rounding everywhere.

    Small values decide who wins, so they need their full relative precision: ``-log(1 - u)`` of a
    float32 ``u`` would lose it near 0, a series does not.
    """
    scale: tl.constexpr = 2.3283064365386963e-10  # 2 ** -32
    u = high.to(tl.float32) * scale + low.to(tl.float32) * (scale * scale)
    # Neither 0 nor 1: an infinite score would win whatever the token's probability.
    u = tl.minimum(tl.maximum(u, 5.0e-20), 0.99999994)
    series = 1.0 / 5 + u * (1.0 / 6 + u * (1.0 / 7))
    series = u * (1.0 + u * (0.5 + u * (1.0 / 3 + u * (0.25 + u * series))))
    return tl.where(u < 0.0625, series, -tl.log(1.0 - u))


@triton.jit
def pack_score(score, index):
    """int64 that sorts by score, then by the lower index."""
    # NaN would sort above everything.
    score = tl.where(score == score, score, float("-inf"))
    score = tl.where(score == 0.0, 0.0, score)
    bits = score.to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (bits.to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)


@triton.jit
def _best_of_splits_kernel(
    logits,
    token_row,
    positions,
    temperature,
    key_low,
    key_high,
    partial,
    stride,
    vocab,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    split, splits = tl.program_id(1), tl.num_programs(1)
    row = tl.load(token_row + token)
    if row >= 0:
        heat = tl.load(temperature + row)
        source = logits + token * stride
        half: tl.constexpr = BLOCK // 2
        lane = tl.arange(0, half)
        least: tl.constexpr = -9223372036854775808
        best = tl.full([half], least, dtype=tl.int64)
        if heat > 0:
            position = tl.load(positions + token).to(tl.uint32)
            low = tl.load(key_low + row).to(tl.uint32, bitcast=True).to(tl.uint64)
            high = tl.load(key_high + row).to(tl.uint32, bitcast=True).to(tl.uint64)
            key = (high << 32) | low
            for start in range(split * BLOCK, vocab, splits * BLOCK):
                near = start + lane
                far = near + half
                # One counter serves a token of each half: both loads stay contiguous.
                counter = (start // 2 + lane).to(tl.uint32)
                zero = counter * 0
                a, b, c, d = tl.philox(key, counter, zero + position, zero, zero)
                for part in tl.static_range(2):
                    index = near if part == 0 else far
                    word = a if part == 0 else c
                    rest = b if part == 0 else d
                    value = tl.load(source + index, mask=index < vocab, other=float("-inf"))
                    score = value.to(tl.float32) / heat - tl.log(exponential(word, rest))
                    best = tl.maximum(best, pack_score(score, index))
        else:
            for start in range(split * BLOCK, vocab, splits * BLOCK):
                for part in tl.static_range(2):
                    index = start + part * half + lane
                    value = tl.load(source + index, mask=index < vocab, other=float("-inf"))
                    best = tl.maximum(best, pack_score(value.to(tl.float32), index))
        tl.store(partial + token * splits + split, tl.max(best, axis=0))


@triton.jit
def _best_kernel(partial, token_row, tokens, splits, SPLITS: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    chosen = tl.zeros([], dtype=tl.int64)
    if tl.load(token_row + token) >= 0:
        split = tl.arange(0, SPLITS)
        least: tl.constexpr = -9223372036854775808
        packed = tl.load(partial + token * splits + split, mask=split < splits, other=least)
        chosen = 0x7FFFFFFF - (tl.max(packed, axis=0) & 0xFFFFFFFF)
    tl.store(tokens + token, chosen)
