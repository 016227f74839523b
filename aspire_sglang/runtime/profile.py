"""Start-up profile: times a few synthetic decode steps through the real model.

The steps read and write KV slots that no request owns yet, through borrowed rows of the request
table, which are put back afterwards.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)

from aspire_sglang.runtime.batching import StepPlan, build_plan
from aspire_sglang.runtime.spec_inputs import MixedForwardInput
from aspire_sglang.speculation.cost_model import StepShape

BUDGET_SECONDS = 8.0
"""No further step is timed after this long."""


def profile_steps(worker: Any) -> list[tuple[StepShape, float]]:
    """Time draft and verify steps of several sizes.

    Args:
        worker: an ``AspireWorker`` whose pools and attention backend are ready.

    Returns:
        (shape, seconds) pairs, the least of the repeats each on the slowest rank; empty where the
        KV pool is too small for a meaningful step.
    """
    table = worker.req_to_token_pool.req_to_token
    page = worker.model_runner.page_size
    samples: list[tuple[StepShape, float]] = []
    saved = table.clone()
    start = time.perf_counter()
    ranks = worker.ranks
    try:
        for rows, seq_len, pending, verify in _steps(worker, page):
            _lend_slots(table, rows, seq_len + pending + 1, page)
            slots = list(range(1, rows + 1))
            shape, seconds = worker.profile_step(slots, seq_len, pending, verify)
            best = min(seconds() for _ in range(worker.profile_repeats))
            samples.append((shape, ranks.slowest(best)))
            # By one clock: a rank that stopped earlier would leave the others waiting.
            if ranks.slowest(time.perf_counter() - start) > BUDGET_SECONDS:
                break
    finally:
        table.copy_(saved)
        worker.model_runner.attn_backend.context.clear()
    return samples if len({shape for shape, _ in samples}) >= 4 else []


def _steps(worker: Any, page: int) -> Iterator[tuple[int, int, int, bool]]:
    """(rows, committed tokens, pending drafts, verify) of each step to time, cheap ones first."""
    room = worker.token_to_kv_pool_allocator.size
    rows_limit = worker.req_to_token_pool.size
    gamma = worker.gamma_max
    longest = worker.context_len - gamma - 2
    modes = [(0, True), (min(1, gamma), False), (min(4, gamma), True), (gamma, True)]
    for seq_len in sorted({min(length, longest) for length in worker.profile_lengths}):
        for rows in worker.profile_rows:
            if rows <= rows_limit and rows * _stride(seq_len + gamma + 1, page) + page <= room:
                for pending, verify in modes:
                    yield rows, seq_len, pending, verify


def _stride(length: int, page: int) -> int:
    return -(-length // page) * page


def _lend_slots(table: torch.Tensor, rows: int, length: int, page: int) -> None:
    # Row 0 of the table and page 0 of the pool are SGLang's padding.
    stride = _stride(length, page)
    slots = torch.arange(page, page + rows * stride, dtype=table.dtype, device=table.device)
    table[1 : rows + 1, :length] = slots.view(rows, stride)[:, :length]


def host_step(
    worker: Any, slots: list[int], seq_len: int, pending: int, verify: bool
) -> tuple[StepShape, Callable[[], float]]:
    """A synthetic step on the CPU: its shape, and a function that times it once."""
    plan = _plan(worker, len(slots), seq_len, pending, verify)
    context = worker.model_runner.attn_backend.context
    shape = plan.shape([context.draft_kv(seq_len + pending)] * len(slots))
    return shape, lambda: _time_step(worker, plan)


def _plan(worker: Any, rows: int, seq_len: int, pending: int, verify: bool) -> StepPlan:
    return build_plan(
        slots=list(range(1, rows + 1)),
        seq_lens=[seq_len] * rows,
        pending=[pending] * rows,
        verify=[verify] * rows,
        bonus=torch.ones(rows, dtype=torch.int64, device=worker.state.tokens.device),
        draft_tokens=worker.state.tokens,
        req_to_token=worker.req_to_token_pool.req_to_token,
    )


def _time_step(worker: Any, plan: StepPlan) -> float:
    seq_lens = torch.tensor(plan.seq_lens, dtype=torch.int64)
    runner = worker.model_runner
    batch = ForwardBatch(
        forward_mode=ForwardMode.TARGET_VERIFY,
        batch_size=len(plan.slots),
        input_ids=plan.input_ids,
        req_pool_indices=torch.tensor(plan.slots, device=plan.input_ids.device),
        seq_lens=seq_lens.to(plan.input_ids.device),
        seq_lens_cpu=seq_lens,
        seq_lens_sum=int(seq_lens.sum()),
        out_cache_loc=plan.out_cache_loc,
        positions=plan.positions,
        spec_algorithm=runner.spec_algorithm,
        spec_info=MixedForwardInput(plan),
        capture_hidden_mode=CaptureHiddenMode.NULL,
        num_token_non_padded_cpu=plan.num_tokens,
    )
    start = time.perf_counter()
    worker.target_worker.forward_batch_generation(None, forward_batch=batch, is_verify=True)
    return time.perf_counter() - start
