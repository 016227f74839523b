"""Log-probabilities of accepted tokens, as plain decoding reports them.

Plain decoding reports the distribution that its sampler sees before top-k, top-p and min-p: logits
over temperature, with penalties and biases; without temperature if the whole batch is greedy or
``SGLANG_RETURN_ORIGINAL_LOGPROB`` is set (``layers/sampler.py``, ``Sampler.forward``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.environ import envs
from torch import Tensor


def report_logprobs(
    output: Any,
    batch: Any,
    verify_rows: list[int],
    pending: list[int],
    logits: Tensor,
    tokens: Tensor,
    accept_lens: list[int],
) -> None:
    """Fill the fields that SGLang's result processing reads.

    Args:
        output: the step's ``LogitsProcessorOutput``; per verified row and accepted token it gets
            the log-probability, and if asked for the best tokens' and the listed tokens'.
        batch: the step's ``ScheduleBatch``.
        verify_rows: rows of the batch that verified.
        pending: drafts of each row of the batch.
        logits: ``[T, V]`` rows of the verify rows' query tokens, as they were sampled from.
        tokens: ``[n, G + 1]`` outcome of the verify rows.
        accept_lens: tokens to commit per verify row.
    """
    width = tokens.shape[1]
    cells: list[int] = []  # places in [n, width]
    flat: list[int] = []  # their rows of logits
    owner: list[int] = []  # and of the batch
    first = 0
    for verified, (row, accepted) in enumerate(zip(verify_rows, accept_lens, strict=True)):
        if batch.reqs[row].return_logprob:
            cells += range(verified * width, verified * width + accepted)
            flat += range(first, first + accepted)
            owner += [row] * accepted
        first += pending[row] + 1
    logprobs = _logprobs(logits[flat], batch.sampling_info, owner)
    chosen = tokens.flatten()[cells].view(-1, 1)
    values = torch.zeros(tokens.numel(), dtype=torch.float32)
    values[cells] = logprobs.gather(1, chosen).view(-1)
    output.next_token_logprobs = values.view(tokens.shape)
    _report_best(output, batch.top_logprobs_nums, logprobs, cells, owner, tokens.numel())
    _report_listed(output, batch.token_ids_logprobs, logprobs, cells, owner, tokens.numel())


def _logprobs(logits: Tensor, sampling_info: Any, owner: list[int]) -> Tensor:
    logits = logits.float()
    if not (sampling_info.is_all_greedy or envs.SGLANG_RETURN_ORIGINAL_LOGPROB.get()):
        logits = logits / sampling_info.temperatures.view(-1, 1)[owner]
    return torch.log_softmax(logits, dim=-1)


def _report_best(
    output: Any, nums: Any, logprobs: Tensor, cells: list[int], owner: list[int], size: int
) -> None:
    most = max((nums[row] for row in owner), default=0) if nums else 0
    if not most:
        return
    values, indices = logprobs.topk(min(most, logprobs.shape[1]), dim=-1)
    # SGLang reads the entries of requests that asked, and turns every entry into a list.
    output.next_token_top_logprobs_val = [values.new_empty(0)] * size
    output.next_token_top_logprobs_idx = [indices.new_empty(0)] * size
    for i, (cell, row) in enumerate(zip(cells, owner, strict=True)):
        output.next_token_top_logprobs_val[cell] = values[i, : nums[row]]
        output.next_token_top_logprobs_idx[cell] = indices[i, : nums[row]]


def _report_listed(
    output: Any, lists: Any, logprobs: Tensor, cells: list[int], owner: list[int], size: int
) -> None:
    if not lists or all(lists[row] is None for row in owner):
        return
    output.next_token_token_ids_logprobs_val = [logprobs.new_empty(0)] * size
    output.next_token_token_ids_logprobs_idx = [[]] * size
    for i, (cell, row) in enumerate(zip(cells, owner, strict=True)):
        if lists[row] is not None:
            output.next_token_token_ids_logprobs_val[cell] = logprobs[i, lists[row]]
            output.next_token_token_ids_logprobs_idx[cell] = lists[row]


def move_logprobs(
    original: Callable[..., None], processor: Any, *, batch: Any, logits_output: Any
) -> None:
    """AROUND ``move_logprobs_to_cpu``: see :func:`mend_listed`."""
    mend_listed(batch, logits_output)
    original(processor, batch=batch, logits_output=logits_output)


def mend_listed(batch: Any, logits_output: Any) -> None:
    """Make tensors of the empty lists that requests which list no ids have beside others that do.

    SGLang turns every entry into a list and meets one already, which ends its scheduler.
    """
    listed = logits_output.next_token_token_ids_logprobs_val
    if batch.return_logprob and listed:
        logits_output.next_token_token_ids_logprobs_val = [torch.as_tensor(v) for v in listed]
