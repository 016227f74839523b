"""The query tokens of a mixed step, gathered on the device from what the host decided and from the
lengths and tokens that only the device knows."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from aspire_sglang.kernels.page_selection import check_rows
from aspire_sglang.kernels.vote_rows import check_table

_BLOCK = 128


def lay_out_step(
    slots: Tensor,
    order: Tensor,
    pending: Tensor,
    token_row: Tensor,
    token_step: Tensor,
    seq_lens: Tensor,
    bonus: Tensor,
    drafts: Tensor,
    known: Tensor,
    req_to_token: Tensor,
    input_ids: Tensor,
    positions: Tensor,
    out_cache_loc: Tensor,
    row_lens: Tensor,
    context_lens: Tensor,
) -> None:
    """Write the tokens of a step and the lengths of its rows.

    Query token ``t`` of row ``r`` stands ``token_step[t]`` positions after the row's final KV; step
    0 is the bonus token, step ``j`` the ``j``-th draft. Padding tokens become token 0 at position 0
    of KV slot 0, padding rows get length 0.

    Args:
        slots: ``[R]`` int, row of the request table; negative rows are padding.
        order: ``[R]`` int, place of the row in the batch that ``seq_lens`` describes.
        pending: ``[R]`` int drafts of the row (``k``).
        token_row: ``[T]`` int row of each query token; negative tokens are padding.
        token_step: ``[T]`` int.
        seq_lens: ``[bs]`` int tokens with final KV (``S``), in batch order.
        bonus: ``[requests]`` int, last committed token by slot.
        drafts: ``[requests, G]`` int pending drafts by slot.
        known: ``[requests]`` int to write to: ``k`` by slot.
        req_to_token: ``[requests, width]`` int32 KV slot of each position.
        input_ids, positions, out_cache_loc: ``[T]`` int64 to write to.
        row_lens: ``[R]`` int64 to write to: ``S``.
        context_lens: ``[R]`` int32 to write to: ``S + k + 1``, 0 for padding.

    Raises:
        ValueError: shapes that do not fit.
    """
    rows, tokens = slots.shape[0], token_row.shape[0]
    check_rows(rows, slots=slots, order=order, pending=pending)
    check_rows(rows, row_lens=row_lens, context_lens=context_lens)
    check_rows(tokens, token_row=token_row, token_step=token_step, input_ids=input_ids)
    check_rows(tokens, positions=positions, out_cache_loc=out_cache_loc)
    check_rows(drafts.shape[0], bonus=bonus, known=known)
    check_table(req_to_token)
    if drafts.dim() != 2 or not drafts.is_contiguous() or not seq_lens.is_contiguous():
        raise ValueError("drafts must be [requests, G] and seq_lens [bs], both contiguous")
    _lay_out_step_kernel[(triton.cdiv(max(rows, tokens), _BLOCK),)](
        slots,
        order,
        pending,
        token_row,
        token_step,
        seq_lens,
        bonus,
        drafts,
        known,
        req_to_token,
        input_ids,
        positions,
        out_cache_loc,
        row_lens,
        context_lens,
        rows,
        tokens,
        drafts.stride(0),
        req_to_token.stride(0),
        BLOCK=_BLOCK,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["rows", "tokens"])
def _lay_out_step_kernel(
    slots,
    order,
    pending,
    token_row,
    token_step,
    seq_lens,
    bonus,
    drafts,
    known,
    req_to_token,
    input_ids,
    positions,
    out_cache_loc,
    row_lens,
    context_lens,
    rows,
    tokens,
    stride_drafts,
    stride_table,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)

    is_row = index < rows
    slot = tl.load(slots + index, mask=is_row, other=-1).to(tl.int64)
    real = is_row & (slot >= 0)
    place = tl.load(order + index, mask=real, other=0)
    length = tl.load(seq_lens + place, mask=real, other=0).to(tl.int64)
    drafted = tl.load(pending + index, mask=real, other=-1).to(tl.int64)
    tl.store(row_lens + index, length, mask=is_row)
    tl.store(context_lens + index, (length + drafted + 1).to(tl.int32), mask=is_row)
    tl.store(known + slot, drafted, mask=real)

    is_token = index < tokens
    row = tl.load(token_row + index, mask=is_token, other=-1)
    real = is_token & (row >= 0)
    row = tl.where(real, row, 0)
    step = tl.load(token_step + index, mask=real, other=0).to(tl.int64)
    slot = tl.load(slots + row, mask=real, other=0).to(tl.int64)
    place = tl.load(order + row, mask=real, other=0)
    position = tl.load(seq_lens + place, mask=real, other=0).to(tl.int64) + step
    last = tl.load(bonus + slot, mask=real & (step == 0), other=0).to(tl.int64)
    draft = drafts + slot * stride_drafts + step - 1
    draft = tl.load(draft, mask=real & (step > 0), other=0).to(tl.int64)
    where = tl.load(req_to_token + slot * stride_table + position, mask=real, other=0)
    tl.store(input_ids + index, last + draft, mask=is_token)
    tl.store(positions + index, tl.where(real, position, 0), mask=is_token)
    tl.store(out_cache_loc + index, where.to(tl.int64), mask=is_token)
