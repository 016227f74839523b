"""Slots ahead of a step: who gets them, and how many."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("sglang.srt.mem_cache.allocation")

from sglang.srt.mem_cache import allocation, allocation_sizing

from aspire_sglang.runtime import reserve


def request(slot: int, committed: int, allocated: int):
    kv = SimpleNamespace(kv_allocated_len=allocated)
    return SimpleNamespace(req_pool_idx=slot, kv_committed_len=committed, kv=kv, decode_batch_idx=4)


def prepare(monkeypatch, reqs, page: int, *, penalties: bool = False, algorithm: str = "ASPIRE"):
    calls, others = [], []
    args = SimpleNamespace(speculative_algorithm=algorithm)
    monkeypatch.setattr(reserve, "get_server_args", lambda: args)
    monkeypatch.setattr(allocation_sizing, "get_alloc_reserve_per_decode", lambda: 10)
    monkeypatch.setattr(allocation, "alloc_for_spec_decode", lambda **given: calls.append(given))
    batch = SimpleNamespace(
        reqs=reqs,
        device="cpu",
        tree_cache=None,
        req_to_token_pool=None,
        token_to_kv_pool_allocator=SimpleNamespace(page_size=page),
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
