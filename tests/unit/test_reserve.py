"""Slots ahead of a step: who gets them, and how many."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("sglang.srt.mem_cache.allocation")

import torch
from sglang.srt.mem_cache import allocation, allocation_sizing

from aspire_sglang.runtime import reserve


def request(slot: int, committed: int, allocated: int):
    kv = SimpleNamespace(kv_allocated_len=allocated)
    return SimpleNamespace(req_pool_idx=slot, kv_committed_len=committed, kv=kv, decode_batch_idx=4)


def prepare(
    monkeypatch,
    reqs,
    page: int,
    *,
    penalties: bool = False,
    algorithm: str = "ASPIRE",
    ahead: int = 0,
    available: int = 1000,
    width: int = 4096,
):
    calls, others = [], []
    args = SimpleNamespace(speculative_algorithm=algorithm)
    monkeypatch.setattr(reserve, "get_server_args", lambda: args)
    monkeypatch.setattr(allocation_sizing, "get_alloc_reserve_per_decode", lambda: 10)
    monkeypatch.setattr(allocation, "alloc_for_spec_decode", lambda **given: calls.append(given))
    monkeypatch.setattr(reserve, "AHEAD", ahead)
    batch = SimpleNamespace(
        reqs=reqs,
        device="cpu",
        tree_cache=None,
        req_to_token_pool=SimpleNamespace(req_to_token=torch.zeros((1, width))),
        token_to_kv_pool_allocator=SimpleNamespace(
            page_size=page, available_size=lambda: available
        ),
        maybe_evict_swa=lambda: None,
        sampling_info=SimpleNamespace(
            penalizer_orchestrator=SimpleNamespace(is_required=penalties)
        ),
    )
    reserve.reserve_slots(others.append, batch)
    return calls, others


def test_only_short_requests_get_slots(monkeypatch):
    reqs = [request(1, 20, 30), request(2, 25, 30), request(3, 20, 31), request(4, 0, 0)]
    calls, others = prepare(monkeypatch, reqs, page=1)
    (given,) = calls
    assert not others
    assert given["reqs"] == [reqs[1], reqs[3]]
    assert given["req_pool_indices"].tolist() == [2, 4]
    assert given["cur_kv_lens"].tolist() == given["cur_kv_lens_cpu"].tolist() == [30, 0]
    assert given["nxt_kv_lens"].tolist() == given["nxt_kv_lens_cpu"].tolist() == [35, 10]
    assert given["num_needed_tokens"] == 15
    assert all(req.decode_batch_idx == 5 for req in reqs)


def test_whole_pages(monkeypatch):
    calls, _ = prepare(monkeypatch, [request(1, 20, 32), request(2, 25, 32)], page=16)
    assert calls[0]["nxt_kv_lens"].tolist() == [48]
    assert calls[0]["num_needed_tokens"] == 16


def test_nothing_to_do(monkeypatch):
    assert prepare(monkeypatch, [request(1, 20, 30)], page=1) == ([], [])


@pytest.mark.parametrize("given", [{"penalties": True}, {"algorithm": "EAGLE"}])
def test_leaves_the_rest_to_sglang(monkeypatch, given):
    calls, others = prepare(monkeypatch, [request(1, 25, 30)], page=1, **given)
    assert not calls
    assert len(others) == 1


def test_everybody_gets_some_once_somebody_needs_slots(monkeypatch):
    reqs = [request(1, 20, 30), request(2, 25, 30), request(3, 20, 140)]
    (given,) = prepare(monkeypatch, reqs, page=1, ahead=64)[0]
    assert given["reqs"] == reqs[:2]
    assert given["nxt_kv_lens"].tolist() == [94, 99]


def test_a_pool_that_is_nearly_full_gives_the_reserve_alone(monkeypatch):
    reqs = [request(1, 20, 30), request(2, 25, 30)]
    (given,) = prepare(monkeypatch, reqs, page=1, ahead=64, available=70)[0]
    assert given["reqs"] == reqs[1:]
    assert given["nxt_kv_lens"].tolist() == [35]


def test_a_row_of_the_request_table_has_an_end(monkeypatch):
    reqs = [request(1, 25, 30), request(2, 90, 95)]
    (given,) = prepare(monkeypatch, reqs, page=16, ahead=64, width=100)[0]
    # Beyond the end only what the table was widened for.
    assert given["nxt_kv_lens"].tolist() == [96, 112]


class Plain:
    """A batch of plain steps."""

    def __init__(self, reqs, page=1, available=1000):
        self.reqs, self.device = reqs, "cpu"
        self.tree_cache = self.req_to_token_pool = None
        self.token_to_kv_pool_allocator = SimpleNamespace(
            page_size=page, available_size=lambda: available
        )

    def maybe_evict_swa(self): ...


def plain(monkeypatch, batch, ahead=1):
    calls = []
    monkeypatch.setattr(allocation_sizing, "get_alloc_reserve_per_decode", lambda: 10)
    monkeypatch.setattr(allocation, "alloc_for_spec_decode", lambda **given: calls.append(given))
    reserve.reserve_plain_slots(batch, ahead)
    return calls


def test_plain_steps_use_the_reserve_up(monkeypatch):
    reqs = [request(1, 20, 22), request(2, 25, 25)]
    (given,) = plain(monkeypatch, Plain(reqs))
    assert given["reqs"] == [reqs[1]]
    assert given["nxt_kv_lens"].tolist() == [35]
    assert [req.kv_committed_len for req in reqs] == [21, 26]
    assert [req.decode_batch_idx for req in reqs] == [5, 5]


def test_plain_steps_of_a_full_pool_take_one_slot_each(monkeypatch):
    reqs = [request(1, 20, 20), request(2, 25, 25)]
    (given,) = plain(monkeypatch, Plain(reqs, available=5))
    assert given["nxt_kv_lens"].tolist() == [21, 26]
    (given,) = plain(monkeypatch, Plain([request(1, 32, 32)], page=16, available=16))
    assert given["nxt_kv_lens"].tolist() == [48]


def test_tokens_whose_number_is_not_known_yet_have_slots_too(monkeypatch):
    assert not plain(monkeypatch, Plain([request(1, 20, 27)]), ahead=6)
    assert plain(monkeypatch, Plain([request(1, 20, 25)]), ahead=6)


def test_every_size_of_a_batch_is_compiled_for_at_start(monkeypatch):
    calls = []

    def assign(rows, table, starts, ends, slots, count):
        assert starts.tolist() == ends.tolist() == [0] * count == rows.tolist()
        calls.append((count, slots.data_ptr() % 16 == 0))

    monkeypatch.setattr(allocation, "assign_req_to_token_pool_func", assign)
    reserve.warm_up(torch.zeros((7, 8), dtype=torch.int32), 6)
    assert {count for count, _ in calls} == {1, 2, 4, 8}
    assert len(set(calls)) == 8


def test_lengths_are_aligned(monkeypatch):
    (given,) = prepare(monkeypatch, [request(slot, 25, 30) for slot in (1, 2, 3)], page=1)[0]
    near, far = given["cur_kv_lens"], given["nxt_kv_lens"]
    assert (near.tolist(), far.tolist()) == ([30] * 3, [35] * 3)
    assert (far.data_ptr() - near.data_ptr()) % 16 == 0
