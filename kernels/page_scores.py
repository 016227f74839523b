"""Page scores of voting queries: softmax probabilities over a whole context, merged over heads and
summed inside pages, in one pass over the keys."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from aspire_sglang.context.selection import Reduction
from aspire_sglang.kernels.vote_rows import KeyScan, VoteRows, check_keys, head_columns

_REDUCTIONS: tuple[Reduction, ...] = ("max", "mean", "sum")


def page_scores(
    q: Tensor,
    lse: Tensor,
    k: Tensor,
    req_to_token: Tensor,
    rows: VoteRows,
    out: Tensor,
    *,
    page_size: int,
    scale: float,
    reduction: Reduction = "max",
    logit_cap: float = 0.0,
    scan: KeyScan | None = None,
) -> Tensor:
    """Score the pages of every context by the attention of its voters.

    A token's score is the ``reduction`` over query heads of ``exp(logit - lse)``, averaged over the
    voters (a token that a voter does not see counts 0 for it); a page's score is the sum over its
    tokens. Lengths are read on the device, so the launch fits a CUDA graph.

    Args:
        q: ``[T, Hq, D]`` float16, bfloat16 or float32, any strides outside ``D``.
        lse: ``[T, Hq]`` float32, natural log-sum-exp of each query's logits, any strides; FA3's
            ``[Hq, T]`` is passed transposed.
        k: ``[num_slots, Hkv, D]``, keys of one layer, the dtype of ``q``.
        req_to_token: ``[requests, width]`` int32 KV slot of each position.
        rows: ``R`` contexts and their voters.
        out: ``[R, P]`` float32. Written up to a context's last page, the rest is left alone.
            Contexts are cut to ``P`` pages.
        page_size: tokens per page, a power of two.
        scale: factor of ``q . k``.
        reduction: merge over query heads.
        logit_cap: ``c`` of ``c * tanh(logit / c)``; 0 for none.
        scan: launch parameters.

    Returns:
        ``out``.

    Raises:
        ValueError: arguments that do not fit each other or that the kernel cannot take.
    """
    scan = scan or KeyScan()
    check_keys(q, k, req_to_token, rows, page_size, scan.block)
    if lse.shape != q.shape[:2] or lse.dtype != torch.float32:
        raise ValueError(f"lse must be {tuple(q.shape[:2])} float32, got {tuple(lse.shape)}")
    if out.dim() != 2 or out.shape[0] != rows.slots.shape[0] or out.dtype != torch.float32:
        raise ValueError(f"out must be [{rows.slots.shape[0]}, P] float32, got {tuple(out.shape)}")
    if out.stride(1) != 1:
        raise ValueError("rows of out must be contiguous")
    if reduction not in _REDUCTIONS:
        raise ValueError(f"reduction must be max, mean or sum, got {reduction!r}")
    if not out.numel():
        return out
    tokens = min(req_to_token.shape[1], out.shape[1] * page_size)
    heads, kv_heads = q.shape[1], k.shape[1]
    _page_scores_kernel[(out.shape[0], scan.splits(out.shape[0], tokens))](
        q,
        lse,
        k,
        req_to_token,
        rows.slots,
        rows.voters,
        rows.positions,
        out,
        scale,
        logit_cap,
        tokens,
        q.stride(0),
        q.stride(1),
        lse.stride(0),
        lse.stride(1),
        k.stride(0),
        k.stride(1),
        req_to_token.stride(0),
        out.stride(0),
        KV_HEADS=kv_heads,
        GROUP=heads // kv_heads,
        HALF=head_columns(heads // kv_heads),
        DIM=q.shape[2],
        PAGE=page_size,
        BLOCK=scan.block,
        MAX=reduction == "max",
        MEAN=reduction == "mean",
        CAPPED=logit_cap > 0,
        EXACT=q.dtype == torch.float32,
        LOG2E=math.log2(math.e),
        num_warps=scan.warps,
        num_stages=scan.stages,
    )
    return out


@triton.jit
def voters_of(slots, voters, positions, row, max_tokens):
    """A context's slot, its two voters (-1: none), the positions they see up to, and its length
    in tokens, 0 for padding."""
    slot = tl.load(slots + row).to(tl.int64)
    first = tl.load(voters + 2 * row).to(tl.int64)
    second = tl.load(voters + 2 * row + 1).to(tl.int64)
    live = slot >= 0
    seen_first = tl.load(positions + first, mask=live & (first >= 0), other=-1).to(tl.int32)
    seen_second = tl.load(positions + second, mask=live & (second >= 0), other=-1).to(tl.int32)
    length = tl.minimum(tl.maximum(seen_first, seen_second) + 1, max_tokens)
    length = tl.where(live, length, 0)
    return slot, first, second, seen_first, seen_second, length


@triton.jit
def capped(logits, logit_cap):
    """``c * tanh(logits / c)``, by the exponential: stable on both sides."""
    return logit_cap * (1.0 - 2.0 / (1.0 + tl.exp(2.0 * logits / logit_cap)))


@triton.jit
def _page_scores_kernel(
    q,
    lse,
    k,
    req_to_token,
    slots,
    voters,
    positions,
    out,
    scale,
    logit_cap,
    max_tokens,
    stride_q_token,
    stride_q_head,
    stride_lse_token,
    stride_lse_head,
    stride_k_slot,
    stride_k_head,
    stride_table,
    stride_out,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HALF: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    MAX: tl.constexpr,
    MEAN: tl.constexpr,
    CAPPED: tl.constexpr,
    EXACT: tl.constexpr,
    LOG2E: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot, first, second, seen_first, seen_second, length = voters_of(
        slots, voters, positions, row, max_tokens
    )
    # Columns of a score tile: the heads of one group for the first voter, then for the second.
    column = tl.arange(0, 2 * HALF)
    head = column % HALF
    voter = tl.where(column < HALF, first, second)
    used = (voter >= 0) & (head < GROUP)
    dim = tl.arange(0, DIM)
    voter_count = tl.maximum((first >= 0).to(tl.int32) + (second >= 0).to(tl.int32), 1)
    weight = 1.0 / voter_count.to(tl.float32)
    if MEAN:
        weight = weight / (GROUP * KV_HEADS)
    query = q + voter[:, None] * stride_q_token + head[:, None] * stride_q_head + dim[None, :]
    normalizer = lse + voter * stride_lse_token + head * stride_lse_head

    step = tl.num_programs(1) * BLOCK
    for start in range(tl.program_id(1) * BLOCK, length, step):
        token = start + tl.arange(0, BLOCK)
        inside = token < length
        kv = tl.load(req_to_token + slot * stride_table + token, mask=inside, other=0)
        key = k + kv.to(tl.int64)[:, None] * stride_k_slot + dim[None, :]
        merged = tl.zeros([BLOCK, 2 * HALF], dtype=tl.float32)
        for kv_head in range(KV_HEADS):
            keys = tl.load(key + kv_head * stride_k_head, mask=inside[:, None], other=0.0)
            group = kv_head * GROUP
            queries = tl.load(query + group * stride_q_head, mask=used[:, None], other=0.0)
            # An infinite normalizer makes unused columns 0.
            norm = tl.load(normalizer + group * stride_lse_head, mask=used, other=float("inf"))
            if EXACT:
                logits = tl.dot(keys, tl.trans(queries), input_precision="ieee") * scale
            else:
                logits = tl.dot(keys, tl.trans(queries)) * scale
            if CAPPED:
                logits = capped(logits, logit_cap)
            probs = tl.exp2((logits - norm[None, :]) * LOG2E)
            if MAX:
                merged = tl.maximum(merged, probs)
            else:
                merged += probs
        # Heads lie side by side in a tile: reduce across columns once, after the last group.
        is_first = (column < HALF)[None, :]
        if MAX:
            of_first = tl.max(tl.where(is_first, merged, 0.0), axis=1)
            of_second = tl.max(tl.where(is_first, 0.0, merged), axis=1)
        else:
            of_first = tl.sum(tl.where(is_first, merged, 0.0), axis=1)
            of_second = tl.sum(tl.where(is_first, 0.0, merged), axis=1)
        score = tl.where(token <= seen_first, of_first, 0.0)
        score += tl.where(token <= seen_second, of_second, 0.0)
        score = tl.where(inside, score * weight, 0.0)
        pages = tl.sum(tl.reshape(score, [BLOCK // PAGE, PAGE]), axis=1)
        page = start // PAGE + tl.arange(0, BLOCK // PAGE)
        tl.store(out + row * stride_out + page, pages, mask=page * PAGE < length)
