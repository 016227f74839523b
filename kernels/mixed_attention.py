"""Split-KV attention over per-row page tables: draft and verify rows of one step in one launch.

The context blocks of all rows and KV heads form one long line. Every program takes an equal piece
of it, whatever rows the piece belongs to, so a batch of one long and many short contexts is as
balanced as an even one, and the launch needs no length from the host. A row whose blocks fall to
several programs is put together by a second, small kernel. The query heads of a KV head and the
queries of a row share a tile, so a verify row reads its context once, as a plain row does.
"""

from __future__ import annotations

import triton
import triton.language as tl


# What changes with the batch is not specialized: each new value could compile again.
@triton.jit(do_not_specialize=["num_rows", "num_programs", "min_share"])
def cut_into_pieces(
    cache_seqlens,
    cu_seqlens_q,
    row_blocks,
    pieces,
    num_rows,
    num_programs,
    min_share,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_PROGRAMS: tl.constexpr,
):
    """Blocks before every row, the row in which every piece begins, and the length of a piece."""
    row = tl.arange(0, BLOCK_ROWS)
    seqlen = tl.load(cache_seqlens + row, mask=row < num_rows, other=0)
    first = tl.load(cu_seqlens_q + row, mask=row < num_rows, other=0)
    last = tl.load(cu_seqlens_q + row + 1, mask=row < num_rows, other=0)
    tiles = tl.cdiv((last - first) * GROUP, BLOCK_M)
    blocks = tl.cdiv(tl.maximum(seqlen, 0), BLOCK_N) * tiles * KV_HEADS
    ends = tl.cumsum(blocks, axis=0)
    tl.store(row_blocks + row + 1, ends, mask=row < num_rows)
    tl.store(row_blocks, 0)
    share = tl.maximum(tl.cdiv(tl.sum(blocks, axis=0), num_programs), min_share)
    tl.store(pieces + num_programs, share)
    for start in range(0, num_programs, BLOCK_PROGRAMS):
        program = start + tl.arange(0, BLOCK_PROGRAMS)
        before = ends[None, :] <= (program * share)[:, None]
        begin = tl.sum(before.to(tl.int32), axis=1)
        tl.store(pieces + program, begin, mask=program < num_programs)


@triton.jit(do_not_specialize=["num_rows", "num_programs", "stride_table", "stride_lse"])
def attend(
    q,
    k,
    v,
    page_table,
    out,
    lse,
    partial,
    partial_lse,
    cache_seqlens,
    cu_seqlens_q,
    row_blocks,
    pieces,
    num_rows,
    num_programs,
    scale,
    logit_cap,
    v_scale,
    stride_q_token,
    stride_q_head,
    stride_k_slot,
    stride_k_head,
    stride_v_slot,
    stride_v_head,
    stride_table,
    stride_out_token,
    stride_out_head,
    stride_lse,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_LSE: tl.constexpr,
    PAGE: tl.constexpr,
    SMALL_M: tl.constexpr,
    CAPPED: tl.constexpr,
    EXACT: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One piece of the line of blocks: the end of a row, whole rows, the beginning of a row."""
    program = tl.program_id(0)
    share = tl.load(pieces + num_programs)
    position = program * share
    end = tl.minimum(position + share, tl.load(row_blocks + num_rows))
    row = tl.load(pieces + program)
    while position < end:
        row_begin = tl.load(row_blocks + row)
        row_end = tl.load(row_blocks + row + 1)
        if row_end > position:
            seqlen = tl.load(cache_seqlens + row)
            first = tl.load(cu_seqlens_q + row)
            q_len = tl.load(cu_seqlens_q + row + 1) - first
            blocks = tl.cdiv(seqlen, BLOCK_N)
            item = (position - row_begin) // blocks
            block = position - row_begin - item * blocks
            count = tl.minimum(blocks - block, end - position)
            tiles = tl.cdiv(q_len * GROUP, BLOCK_M)
            head = (item // tiles).to(tl.int64)
            # A row that is cut goes to a slot of its own: 0 where the piece begins, 1 at its end.
            cut = count < blocks
            slot = program * 2 + (block == 0).to(tl.int32)
            k_head = k + head * stride_k_head
            v_head = v + head * stride_v_head
            q_row = q + first.to(tl.int64) * stride_q_token + head * GROUP * stride_q_head
            out_row = out + first.to(tl.int64) * stride_out_token + head * GROUP * stride_out_head
            lse_row = lse + first.to(tl.int64) * stride_lse + head * GROUP
            table = page_table + row.to(tl.int64) * stride_table
            few = q_len * GROUP <= SMALL_M
            # With one tile size for all, the second copy of the loop is dropped at compile time.
            if few & (SMALL_M < BLOCK_M):
                _attend_blocks(
                    q_row, k_head, v_head, table, out_row, lse_row, partial, partial_lse,
                    0, q_len, seqlen, block, count, cut, slot, scale, logit_cap, v_scale,
                    stride_q_token, stride_q_head, stride_k_slot, stride_v_slot,
                    stride_out_token, stride_out_head, stride_lse,
                    GROUP, DIM, SMALL_M, BLOCK_M, BLOCK_N, HAS_LSE, PAGE, CAPPED, EXACT, STAGES,
                )  # fmt: skip
            else:
                _attend_blocks(
                    q_row, k_head, v_head, table, out_row, lse_row, partial, partial_lse,
                    item % tiles, q_len, seqlen, block, count, cut, slot, scale, logit_cap, v_scale,
                    stride_q_token, stride_q_head, stride_k_slot, stride_v_slot,
                    stride_out_token, stride_out_head, stride_lse,
                    GROUP, DIM, BLOCK_M, BLOCK_M, BLOCK_N, HAS_LSE, PAGE, CAPPED, EXACT, STAGES,
                )  # fmt: skip
            position += count
        row += (row_end <= position).to(tl.int32)


@triton.jit
def _attend_blocks(
    q, k, v, table, out, lse, partial, partial_lse,
    tile, q_len, seqlen, block, count, cut, slot, scale, logit_cap, v_scale,
    stride_q_token, stride_q_head, stride_k_slot, stride_v_slot,
    stride_out_token, stride_out_head, stride_lse,
    GROUP: tl.constexpr, DIM: tl.constexpr, TILE_M: tl.constexpr, SLOT_M: tl.constexpr,
    BLOCK_N: tl.constexpr, HAS_LSE: tl.constexpr, PAGE: tl.constexpr, CAPPED: tl.constexpr,
    EXACT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """``count`` context blocks of one tile of queries, one KV head; logits are in base 2."""
    LN2: tl.constexpr = 0.6931471805599453
    m = tile * TILE_M + tl.arange(0, TILE_M)
    d = tl.arange(0, DIM)
    token = m // GROUP
    member = m % GROUP
    real = token < q_len
    q_offset = token.to(tl.int64) * stride_q_token + member * stride_q_head
    queries = tl.load(q + q_offset[:, None] + d[None, :], mask=real[:, None], other=0.0)
    # The queries are the last tokens of the row; each sees what is listed up to itself. Not "less
    # than own + 1": ptxas (12.8, 13.0) loses the 1 where LLVM adds it to packed 16-bit numbers.
    own = seqlen - q_len + token
    top = tl.full([TILE_M], float("-inf"), tl.float32)
    total = tl.zeros([TILE_M], tl.float32)
    acc = tl.zeros([TILE_M, DIM], tl.float32)
    last_page = (seqlen - 1) // PAGE
    ahead = block * BLOCK_N + tl.arange(0, BLOCK_N)
    next_page = tl.load(table + tl.minimum(ahead // PAGE, last_page))
    for i in tl.range(block, block + count, num_stages=STAGES):
        n = i * BLOCK_N + tl.arange(0, BLOCK_N)
        listed = n < seqlen
        place = next_page.to(tl.int64) * PAGE + n % PAGE
        # Pages are fetched a block ahead: keys that waited for them could not be fetched early.
        ahead = n + BLOCK_N
        next_page = tl.load(table + tl.minimum(ahead // PAGE, last_page))
        keys = tl.load(
            k + place[None, :] * stride_k_slot + d[:, None], mask=listed[None, :], other=0.0
        )
        if EXACT:
            logits = tl.dot(queries, keys.to(queries.dtype), input_precision="ieee") * scale
        else:
            logits = tl.dot(queries, keys.to(queries.dtype)) * scale
        if CAPPED:
            # tanh(x) = 1 - 2 / (exp(2x) + 1)
            grown = tl.exp2(logits * (2.0 / LN2) / logit_cap)
            logits = (1.0 - 2.0 / (grown + 1.0)) * (logit_cap / LN2)
        logits = tl.where(n[None, :] <= own[:, None], logits, float("-inf"))
        new_top = tl.maximum(top, tl.max(logits, axis=1))
        # A query that has seen nothing yet must not turn into NaN.
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(logits - base[:, None])
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(weights, axis=1)
        # Values beyond the row are zeroed: 0 * NaN of an unused slot would stay NaN.
        values = tl.load(
            v + place[:, None] * stride_v_slot + d[None, :], mask=listed[:, None], other=0.0
        ).to(queries.dtype)
        acc = acc * shrink[:, None]
        if EXACT:
            acc = tl.dot(weights, values, acc, input_precision="ieee")
        else:
            acc = tl.dot(weights.to(queries.dtype), values, acc)
        top = new_top
    seen = total > 0
    acc = acc * (tl.where(seen, v_scale / tl.where(seen, total, 1.0), 0.0))[:, None]
    log2 = tl.where(seen, top + tl.log2(tl.where(seen, total, 1.0)), float("-inf"))
    if cut:
        index = slot.to(tl.int64) * SLOT_M + tl.arange(0, TILE_M)
        tl.store(partial + index[:, None] * DIM + d[None, :], acc, mask=real[:, None])
        tl.store(partial_lse + index, log2, mask=real)
    else:
        out_offset = token.to(tl.int64) * stride_out_token + member * stride_out_head
        tl.store(
            out + out_offset[:, None] + d[None, :], acc.to(out.dtype.element_ty), mask=real[:, None]
        )
        if HAS_LSE:
            tl.store(lse + token.to(tl.int64) * stride_lse + member, log2 * LN2, mask=real)


@triton.jit(do_not_specialize=["num_programs", "stride_lse"])
def merge(
    out,
    lse,
    partial,
    partial_lse,
    cache_seqlens,
    cu_seqlens_q,
    row_blocks,
    pieces,
    num_programs,
    stride_out_token,
    stride_out_head,
    stride_lse,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_LSE: tl.constexpr,
    TILE_M: tl.constexpr,
):
    """Put cut rows together, and give rows without context their zeros."""
    LN2: tl.constexpr = 0.6931471805599453
    row = tl.program_id(0)
    head = tl.program_id(1)
    start = tl.program_id(2) * TILE_M
    first = tl.load(cu_seqlens_q + row)
    q_len = tl.load(cu_seqlens_q + row + 1) - first
    if start < q_len * GROUP:
        blocks = tl.cdiv(tl.maximum(tl.load(cache_seqlens + row), 0), BLOCK_N)
        share = tl.load(pieces + num_programs)
        item = head * tl.cdiv(q_len * GROUP, BLOCK_M) + start // BLOCK_M
        begin = tl.load(row_blocks + row) + item * blocks
        first_piece = begin // share
        last_piece = (begin + blocks - 1) // share
        if (blocks == 0) | (last_piece > first_piece):
            m = start + tl.arange(0, TILE_M)
            d = tl.arange(0, DIM)
            real = m < q_len * GROUP
            top = tl.full([TILE_M], float("-inf"), tl.float32)
            total = tl.zeros([TILE_M], tl.float32)
            acc = tl.zeros([TILE_M, DIM], tl.float32)
            # A row without blocks has no pieces.
            for piece in range(first_piece, tl.where(blocks == 0, first_piece, last_piece + 1)):
                slot = piece * 2 + (piece * share <= begin).to(tl.int32)
                index = slot.to(tl.int64) * BLOCK_M + m % BLOCK_M
                part_lse = tl.load(partial_lse + index, mask=real, other=float("-inf"))
                part = tl.load(
                    partial + index[:, None] * DIM + d[None, :], mask=real[:, None], other=0.0
                )
                new_top = tl.maximum(top, part_lse)
                base = tl.where(new_top == float("-inf"), 0.0, new_top)
                shrink = tl.exp2(top - base)
                weight = tl.exp2(part_lse - base)
                acc = acc * shrink[:, None] + part * weight[:, None]
                total = total * shrink + weight
                top = new_top
            seen = total > 0
            acc = acc / tl.where(seen, total, 1.0)[:, None]
            token = first.to(tl.int64) + m // GROUP
            q_head = head * GROUP + m % GROUP
            out_offset = token * stride_out_token + q_head * stride_out_head
            tl.store(
                out + out_offset[:, None] + d[None, :],
                acc.to(out.dtype.element_ty),
                mask=real[:, None],
            )
            if HAS_LSE:
                log2 = tl.where(seen, top + tl.log2(tl.where(seen, total, 1.0)), float("-inf"))
                tl.store(lse + token * stride_lse + q_head, log2 * LN2, mask=real)
