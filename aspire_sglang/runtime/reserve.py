"""KV slots ahead of a step, for the requests that need some."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from sglang.srt.runtime_context import get_server_args

from aspire_sglang.runtime.arguments import is_aspire

AHEAD = 64
"""Slots beyond the reserve that a request is given where the pool has them; whole pages."""

_ALIGN = 4


def reserve_slots(original: Callable[[Any], None], batch: Any) -> None:
    """AROUND ``eagle_prepare_for_decode``: give slots to requests whose reserve ran low.

    Only a verify uses up a reserve, and most rows of a step draft, so most steps have little to
    do. SGLang looks at every row, one tensor element at a time, and copies all lengths.
    """
    orchestrator = batch.sampling_info.penalizer_orchestrator
    if not is_aspire(get_server_args()) or orchestrator.is_required:
        return original(batch)
    batch.maybe_evict_swa()
    reserve = _reserve()
    ran_low = False
    for req in batch.reqs:
        req.decode_batch_idx += 1
        ran_low |= req.kv.kv_allocated_len < req.kv_committed_len + reserve
    if not ran_low:
        return None
    # Once somebody needs slots, everybody gets some: then most steps hand out none.
    allocator = batch.token_to_kv_pool_allocator
    page = allocator.page_size
    # A row of the request table has an end.
    widest = batch.req_to_token_pool.req_to_token.shape[1] // page * page

    def shares(more: int) -> list[tuple[Any, int, int]]:
        found = []
        for req in batch.reqs:
            held = req.kv.kv_allocated_len
            # The allocator hands out whole pages.
            least = -(-(req.kv_committed_len + reserve) // page) * page
            wanted = max(least, min(least + more, widest))
            if held < wanted:
                found.append((req, held, wanted))
        return found

    given = shares(AHEAD)
    if sum(wanted - held for _, held, wanted in given) > allocator.available_size():
        # SGLang made sure of the reserve alone.
        given = shares(0)
    if given:
        needy, held, wanted = zip(*given, strict=True)
        _give_slots(batch, list(needy), held, wanted)
    return None


def reserve_plain_slots(batch: Any, ahead: int) -> None:
    """Give slots for a plain step, and count its token as SGLang does when it prepares one.

    Requests that ran out get a reserve again if the pool has it, so most steps allocate nothing.

    Args:
        ahead: slots that a request must hold beyond its committed tokens: 1, or more while the
            host does not know yet how many those are.
    """
    batch.maybe_evict_swa()
    needy = []
    for req in batch.reqs:
        req.decode_batch_idx += 1
        committed = req.kv_committed_len
        req.kv_committed_len = committed + 1
        if req.kv.kv_allocated_len < committed + ahead:
            needy.append(req)
    if not needy:
        return
    allocator = batch.token_to_kv_pool_allocator
    page = allocator.page_size

    def targets(more: int) -> list[int]:
        return [-(-(req.kv_committed_len - 1 + more) // page) * page for req in needy]

    held = [req.kv.kv_allocated_len for req in needy]
    wanted = targets(_reserve())
    if sum(wanted) - sum(held) > allocator.available_size():
        # SGLang made sure of this much.
        wanted = targets(ahead)
    _give_slots(batch, needy, held, wanted)


def _reserve() -> int:
    # Imported late: hooks are registered while SGLang is half-imported.
    from sglang.srt.mem_cache.allocation_sizing import get_alloc_reserve_per_decode

    return get_alloc_reserve_per_decode()


def warm_up(req_to_token: torch.Tensor, most: int) -> None:
    """Compile the kernel that writes handed out slots, for all that it is compiled for.

    It is compiled for each power of two of requests and for aligned and other addresses of the
    slots, each when it is first met: the requests running then would wait for the compiler.

    Args:
        req_to_token: the request table; nothing is written.
        most: requests that may run at once.
    """
    from sglang.srt.mem_cache.allocation import assign_req_to_token_pool_func

    device, size = req_to_token.device, 1
    lengths = torch.zeros(2 * most, dtype=torch.int32, device=device)
    rows = torch.zeros(2 * most, dtype=torch.int64, device=device)
    slots = torch.zeros(2, dtype=torch.int64, device=device)
    while size < 2 * most:
        for start in (0, 1):
            assign_req_to_token_pool_func(
                rows[:size], req_to_token, lengths[:size], lengths[:size], slots[start:], size
            )
        size *= 2


def _give_slots(batch: Any, needy: list[Any], held: Sequence[int], wanted: Sequence[int]) -> None:
    from sglang.srt.mem_cache.allocation import alloc_for_spec_decode

    on_gpu = torch.device(batch.device).type == "cuda"
    count = len(needy)
    # Both rows at aligned addresses: kernels are compiled anew for others.
    filling = [0] * (-count % _ALIGN)
    rows = [[*held, *filling], [*wanted, *filling]]
    lengths = torch.tensor(rows, dtype=torch.int32, pin_memory=on_gpu)
    slots = torch.tensor([req.req_pool_idx for req in needy], pin_memory=on_gpu)
    # A blocking copy would wait for the step that is running.
    there = lengths.to(batch.device, non_blocking=True)
    alloc_for_spec_decode(
        tree_cache=batch.tree_cache,
        req_to_token_pool=batch.req_to_token_pool,
        reqs=needy,
        req_pool_indices=slots.to(batch.device, non_blocking=True),
        cur_kv_lens=there[0, :count],
        cur_kv_lens_cpu=lengths[0, :count],
        nxt_kv_lens=there[1, :count],
        nxt_kv_lens_cpu=lengths[1, :count],
        num_needed_tokens=sum(wanted) - sum(held),
        batch=batch,
    )
