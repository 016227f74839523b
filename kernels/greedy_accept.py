"""The accept rule of greedy decoding and the state it moves, for all rows of a mixed step."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from aspire_sglang.kernels.page_selection import check_rows


def accept_greedy(
    target_tokens: Tensor,
    qo_indptr: Tensor,
    slots: Tensor,
    draft: Tensor,
    drafts: Tensor,
    pending: Tensor,
    bonus: Tensor,
    seq_lens: Tensor,
    tokens: Tensor,
    accept_len: Tensor,
) -> None:
    """Judge the drafts of verify rows and append the draft token of draft rows.

    A verify row accepts the longest prefix of its ``k`` pending drafts that equals the target's
    tokens and adds the target's own: ``a + 1`` tokens. It is also the accept rule of coupled
    sampling, with the target's samples for ``target_tokens``.

    Args:
        target_tokens: ``[T]`` int, the target's token after each query token.
        qo_indptr: ``[n + 1]`` int, first query token of each row; a verify row owns ``k + 1``, a
            draft row one.
        slots: ``[n]`` int, row of the request state; negative rows are padding and inert.
        draft: ``[n]`` bool or int, true for draft rows.
        drafts: ``[requests, G]`` int pending drafts by slot; a draft row appends its token.
        pending: ``[requests]`` int ``k`` by slot: draft rows add 1 (not beyond ``G``), verify rows
            set 0.
        bonus: ``[requests]`` int by slot: verify rows set the last committed token.
        seq_lens: ``[n]`` int, tokens with final KV by row: verify rows add ``a + 1``.
        tokens: ``[n, G + 1]`` int to write to: accepted drafts, the target's token, then zeros; all
            zeros for draft rows. Padding rows are left alone.
        accept_len: ``[n]`` int to write to: ``a + 1`` for verify rows, 0 for draft rows.

    Raises:
        ValueError: shapes that do not fit.
    """
    count = slots.shape[0]
    check_rows(count, slots=slots, draft=draft, seq_lens=seq_lens, accept_len=accept_len)
    check_rows(count + 1, qo_indptr=qo_indptr)
    check_rows(target_tokens.shape[0], target_tokens=target_tokens)
    if drafts.dim() != 2 or not drafts.is_contiguous():
        raise ValueError(f"drafts must be [requests, G] contiguous, got {tuple(drafts.shape)}")
    check_rows(drafts.shape[0], pending=pending, bonus=bonus)
    depth = drafts.shape[1]
    if tokens.shape != (count, depth + 1) or not tokens.is_contiguous():
        raise ValueError(f"tokens must be [{count}, {depth + 1}], got {tuple(tokens.shape)}")
    if not count:
        return
    _accept_greedy_kernel[(count,)](
        target_tokens,
        qo_indptr,
        slots,
        draft,
        drafts,
        pending,
        bonus,
        seq_lens,
        tokens,
        accept_len,
        DEPTH=depth,
        BLOCK=triton.next_power_of_2(depth + 1),
        num_warps=1,
    )


@triton.jit
def _accept_greedy_kernel(
    target_tokens,
    qo_indptr,
    slots,
    is_draft,
    drafts,
    pending,
    bonus,
    seq_lens,
    tokens,
    accept_len,
    DEPTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    if slot >= 0:
        first = tl.load(qo_indptr + row).to(tl.int64)
        known = tl.load(pending + slot).to(tl.int32)
        column = tl.arange(0, BLOCK)
        out = tokens + row * (DEPTH + 1) + column
        if tl.load(is_draft + row) == 0:
            target = tl.load(target_tokens + first + column, mask=column <= known, other=0)
            draft = tl.load(drafts + slot * DEPTH + column, mask=column < known, other=0)
            # The first draft that differs ends the run; past the drafts every column does.
            differs = (column >= known) | (draft.to(tl.int64) != target.to(tl.int64))
            accepted = tl.min(tl.where(differs, column, BLOCK), axis=0)
            kept = tl.where(column <= accepted, target, 0)
            tl.store(out, kept, mask=column <= DEPTH)
            tl.store(accept_len + row, accepted + 1)
            tl.store(seq_lens + row, tl.load(seq_lens + row) + accepted + 1)
            tl.store(bonus + slot, tl.load(target_tokens + first + accepted))
            tl.store(pending + slot, 0)
        else:
            tl.store(out, 0, mask=column <= DEPTH)
            tl.store(accept_len + row, 0)
            if known < DEPTH:
                tl.store(drafts + slot * DEPTH + known, tl.load(target_tokens + first))
                tl.store(pending + slot, known + 1)
