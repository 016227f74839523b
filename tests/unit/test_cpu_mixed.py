"""Mixed attention of the CPU platform: which rows vote for page lists, and which read what."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from aspire_sglang.attention.cpu_mixed import CpuMixedAttention
from aspire_sglang.attention.rows import ForwardRows
from aspire_sglang.context.selection import SelectionConfig
from aspire_sglang.context.sparse import RefreshConfig, SparseContext

SLOTS, WIDTH, HEADS, KV_HEADS, DIM = 4, 1024, 6, 2, 16
LAYER = SimpleNamespace(layer_id=0, scaling=0.25, logit_cap=0.0)


@pytest.fixture
def attention() -> CpuMixedAttention:
    torch.manual_seed(0)
    size = SLOTS * WIDTH
    keys, values = torch.randn(2, KV_HEADS, size, DIM).unbind(0)
    pool = SimpleNamespace(start_layer=0, head_major=lambda layer_id: (keys, values))
    table = torch.randperm(size).view(SLOTS, WIDTH).int()
    mixed = CpuMixedAttention(num_heads=HEADS, req_to_token=table, pool=pool)
    mixed.context = SparseContext(
        # Ten pages of 16 tokens: contexts to 96 tokens and a longest run of drafts are dense.
        SelectionConfig(min_pages=10, ratio=0.01, last_pages=2),
        RefreshConfig("refresh", layer=0, same_step=True),
        num_layers=2,
        num_slots=SLOTS,
        context_len=WIDTH,
    )
    return mixed


def run(attention: CpuMixedAttention, rows: ForwardRows) -> torch.Tensor:
    q = torch.randn(sum(rows.q_lens), HEADS, DIM, generator=torch.Generator().manual_seed(1))
    out = torch.full_like(q, float("nan"))
    attention.plan(rows)
    attention.attend(LAYER, q, out)
    assert out.isfinite().all()
    return out


def has_list(attention: CpuMixedAttention) -> list[bool]:
    assert attention.context is not None
    return attention.context.lists.has(torch.arange(SLOTS)).tolist()


def test_a_long_prompt_makes_a_list_and_a_short_one_forgets_the_last_owners(attention):
    run(attention, ForwardRows([1, 2], [300, 300], [300, 300], [False, False]))
    assert has_list(attention) == [False, True, True, False]
    run(attention, ForwardRows([2], [50], [50], [False]))
    assert has_list(attention) == [False, True, False, False]


def test_dense_rows_do_not_vote_while_decoding(attention):
    rows = ForwardRows([1, 3], [1, 1], [90, 500], [False, False], decoding=True)
    run(attention, rows)
    assert has_list(attention) == [False, False, False, True]
    rows = ForwardRows([1, 2], [1, 1], [96, 97], [True, True], decoding=True)
    run(attention, rows)
    assert has_list(attention) == [False, False, True, True]


def test_a_dense_draft_row_reads_what_a_full_row_reads(attention):
    drafts = run(attention, ForwardRows([1, 2], [1, 1], [70, 90], [True, True], decoding=True))
    full = run(attention, ForwardRows([1, 2], [1, 1], [70, 90], [False, False], decoding=True))
    torch.testing.assert_close(drafts, full)


def test_draft_rows_come_first_in_the_flat_batch(attention):
    """A mixed step equals its rows run alone, whatever their order in the batch."""
    mixed = ForwardRows([1, 2, 3], [4, 1, 2], [300, 90, 200], [False, True, False], decoding=True)
    q = torch.randn(7, HEADS, DIM, generator=torch.Generator().manual_seed(1))
    out = run(attention, mixed)
    places = {1: slice(0, 1), 0: slice(1, 5), 2: slice(5, 7)}
    for row, place in places.items():
        alone = ForwardRows(
            [mixed.slots[row]],
            [mixed.q_lens[row]],
            [mixed.context_lens[row]],
            [mixed.draft[row]],
            decoding=True,
        )
        part = torch.empty_like(q[place])
        attention.plan(alone)
        attention.attend(LAYER, q[place], part)
        torch.testing.assert_close(out[place], part)
