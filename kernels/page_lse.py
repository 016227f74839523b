"""Log-sum-exp of the attention logits of voting queries per page, in one pass over the keys.

Unlike page scores this needs no log-sum-exp of the whole context: the pages' own values add up to
it. A layer whose attention kernel does not return one can so be scored all the same.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from aspire_sglang.kernels.page_scores import capped, voters_of
from aspire_sglang.kernels.vote_rows import VOTERS, KeyScan, VoteRows, check_keys, head_columns


def page_lse(
    q: Tensor,
    k: Tensor,
    req_to_token: Tensor,
    rows: VoteRows,
    out: Tensor,
    *,
    page_size: int,
    scale: float,
    lse: Tensor | None = None,
    logit_cap: float = 0.0,
    scan: KeyScan | None = None,
) -> Tensor:
    """Natural log of the sum over a page's tokens of ``exp(logit)``, per voter.

    Args:
        q, k, req_to_token, rows, page_size, scale, logit_cap: as in
            :func:`aspire_sglang.kernels.page_scores.page_scores`.
        out: ``[R, 2, H, P]`` float32. ``H`` = ``Hq`` gives every query head, ``H`` = ``Hkv`` the
            greatest value among the query heads of each KV head, which is meaningful with ``lse``
            only. Written for existing voters up to the context's last page (-inf for a page that a
            voter does not see), the rest is left alone.
        lse: ``[T, Hq]`` float32; subtracted if given, which makes the values the log of the
            probability mass of a page.
        scan: launch parameters.

    Returns:
        ``out``.

    Raises:
        ValueError: arguments that do not fit each other or that the kernel cannot take.
    """
    scan = scan or KeyScan()
    check_keys(q, k, req_to_token, rows, page_size, scan.block)
    count, heads, kv_heads = rows.slots.shape[0], q.shape[1], k.shape[1]
    if out.dim() != 4 or out.shape[:2] != (count, VOTERS) or out.shape[2] not in (heads, kv_heads):
        raise ValueError(
            f"out must be [{count}, {VOTERS}, {heads} or {kv_heads}, P], got {tuple(out.shape)}"
        )
    if out.dtype != torch.float32 or not out.is_contiguous():
        raise ValueError("out must be contiguous float32")
    if lse is not None and (lse.shape != q.shape[:2] or lse.dtype != torch.float32):
        raise ValueError(f"lse must be {tuple(q.shape[:2])} float32, got {tuple(lse.shape)}")
    if not out.numel():
        return out
    tokens = min(req_to_token.shape[1], out.shape[3] * page_size)
    _page_lse_kernel[(count, scan.splits(count, tokens))](
        q,
        lse if lse is not None else out,
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
        lse.stride(0) if lse is not None else 0,
        lse.stride(1) if lse is not None else 0,
        k.stride(0),
        k.stride(1),
        req_to_token.stride(0),
        out.shape[3],
        KV_HEADS=kv_heads,
        GROUP=heads // kv_heads,
        HALF=head_columns(heads // kv_heads),
        DIM=q.shape[2],
        PAGE=page_size,
        BLOCK=scan.block,
        PER_HEAD=out.shape[2] == heads,
        NORMALIZED=lse is not None,
        CAPPED=logit_cap > 0,
        EXACT=q.dtype == torch.float32,
        LOG2E=math.log2(math.e),
        num_warps=scan.warps,
        num_stages=scan.stages,
    )
    return out


@triton.jit
def _page_lse_kernel(
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
    num_pages,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HALF: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    PER_HEAD: tl.constexpr,
    NORMALIZED: tl.constexpr,
    CAPPED: tl.constexpr,
    EXACT: tl.constexpr,
    LOG2E: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot, first, second, seen_first, seen_second, length = voters_of(
        slots, voters, positions, row, max_tokens
    )
    column = tl.arange(0, 2 * HALF)
    head = column % HALF
    side = column // HALF
    voter = tl.where(side == 0, first, second)
    used = (voter >= 0) & (head < GROUP)
    seen = tl.where(side == 0, seen_first, seen_second)
    dim = tl.arange(0, DIM)
    query = q + voter[:, None] * stride_q_token + head[:, None] * stride_q_head + dim[None, :]
    normalizer = lse + voter * stride_lse_token + head * stride_lse_head

    step = tl.num_programs(1) * BLOCK
    for start in range(tl.program_id(1) * BLOCK, length, step):
        token = start + tl.arange(0, BLOCK)
        inside = token < length
        kv = tl.load(req_to_token + slot * stride_table + token, mask=inside, other=0)
        key = k + kv.to(tl.int64)[:, None] * stride_k_slot + dim[None, :]
        hidden = (token[:, None] > seen[None, :]) | (token[:, None] >= length)
        page = start // PAGE + tl.arange(0, BLOCK // PAGE)
        exists = page * PAGE < length
        for kv_head in range(KV_HEADS):
            keys = tl.load(key + kv_head * stride_k_head, mask=inside[:, None], other=0.0)
            group = kv_head * GROUP
            queries = tl.load(query + group * stride_q_head, mask=used[:, None], other=0.0)
            if EXACT:
                logits = tl.dot(keys, tl.trans(queries), input_precision="ieee") * scale
            else:
                logits = tl.dot(keys, tl.trans(queries)) * scale
            if CAPPED:
                logits = capped(logits, logit_cap)
            logits = tl.where(hidden, float("-inf"), logits * LOG2E)
            by_page = tl.reshape(logits, [BLOCK // PAGE, PAGE, 2 * HALF])
            top = tl.max(by_page, axis=1)
            # A page that is not seen at all has no finite maximum to subtract.
            top = tl.where(top == float("-inf"), 0.0, top)
            mass = tl.sum(tl.exp2(by_page - top[:, None, :]), axis=1)
            value = (top + tl.log2(mass)) / LOG2E
            if NORMALIZED:
                norm = tl.load(normalizer + group * stride_lse_head, mask=used, other=0.0)
                value -= norm[None, :]
            if PER_HEAD:
                line = (row * 2 + side) * (KV_HEADS * GROUP) + group + head
                target = out + line[None, :] * num_pages + page[:, None]
                tl.store(target, value, mask=used[None, :] & exists[:, None])
            else:
                of_first = tl.where((used & (side == 0))[None, :], value, float("-inf"))
                of_second = tl.where((used & (side == 1))[None, :], value, float("-inf"))
                target = out + (row * 2 * KV_HEADS + kv_head) * num_pages + page
                tl.store(target, tl.max(of_first, axis=1), mask=exists & (first >= 0))
                target += KV_HEADS * num_pages
                tl.store(target, tl.max(of_second, axis=1), mask=exists & (second >= 0))
