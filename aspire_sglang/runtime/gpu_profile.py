"""Synthetic steps on a GPU, for the start-up profile."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)

from aspire_sglang.attention.step_buffers import HostStep
from aspire_sglang.runtime.batching import step_shape
from aspire_sglang.runtime.gpu_step import Staged
from aspire_sglang.runtime.spec_inputs import StagedForwardInput
from aspire_sglang.speculation.cost_model import StepShape


def device_step(
    worker: Any, slots: list[int], seq_len: int, pending: int, verify: bool
) -> tuple[StepShape, Callable[[], float]]:
    """A step of equal rows: its shape, and a function that times it once."""
    rows, device = len(slots), worker.req_to_token_pool.req_to_token.device
    seq_lens = torch.full((rows,), seq_len, dtype=torch.int64, device=device)
    draft_kv = worker.model_runner.attn_backend.context.draft_kv(seq_len + pending)
    pendings, modes = [pending] * rows, [verify] * rows
    shape = step_shape([seq_len] * rows, pendings, modes, [draft_kv] * rows)

    def seconds() -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        staged = worker.stage(HostStep.build(slots, pendings, modes), seq_lens)
        if worker.mixed_graphs is not None and staged.layout is not None:
            worker.mixed_graphs.replay(staged.layout.graph_num_tokens)
        else:
            _run(worker, staged, slots, seq_lens, rows * seq_len)
        torch.cuda.synchronize()
        return time.perf_counter() - start

    return shape, seconds


def _run(
    worker: Any, staged: Staged, slots: list[int], seq_lens: torch.Tensor, seq_lens_sum: int
) -> None:
    view, device = staged.view, seq_lens.device
    batch = ForwardBatch(
        forward_mode=ForwardMode.TARGET_VERIFY,
        batch_size=len(slots),
        input_ids=view.input_ids,
        req_pool_indices=torch.tensor(slots, device=device),
        seq_lens=seq_lens,
        seq_lens_sum=seq_lens_sum,
        out_cache_loc=view.out_cache_loc,
        positions=view.positions,
        spec_algorithm=worker.model_runner.spec_algorithm,
        spec_info=StagedForwardInput(view.positions, staged.layout),
        capture_hidden_mode=CaptureHiddenMode.NULL,
        num_token_non_padded_cpu=view.input_ids.shape[0],
    )
    worker.target_worker.forward_batch_generation(None, forward_batch=batch, is_verify=True)
