"""What a request does to its logits before sampling, for every position of a mixed step.

Plain decoding penalises, masks, biases and processes the logits of one token at a time. Here a row
may hold several positions, each after another number of pending drafts. Draft rows get the same
treatment, so that drafts are proposed from the distribution they will be judged by.

The text a rule looks at is ``req.output_ids`` plus pending drafts. SGLang's own penalty counters
advance once per step, whatever it committed, so they are not used (:func:`drop_penalizers`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from sglang.srt.runtime_context import get_server_args

from aspire_sglang.runtime.arguments import is_aspire
from aspire_sglang.runtime.batching import StepPlan
from aspire_sglang.runtime.grammars import mask_logits
from aspire_sglang.sampling.penalties import Penalties, dense_terms, penalise


def apply_logit_rules(
    plan: StepPlan,
    reqs: Sequence[Any],
    draft_tokens: torch.Tensor,
    logits: torch.Tensor,
    sampling_info: Any,
) -> None:
    """Change the logits of a mixed step in place, in plain decoding's order.

    Args:
        plan: the step's rows.
        reqs: SGLang's ``Req`` per row of the batch.
        draft_tokens: ``[num_slots, gamma_max]`` int64 pending drafts.
        logits: ``[T, V]`` rows of the step's query tokens, in the plan's order.
        sampling_info: SGLang's ``SamplingBatchInfo`` of the batch.
    """
    spans = {row: span for row, span in _spans(plan).items() if _has_rules(reqs[row])}
    drafts = {row: draft_tokens[plan.slots[row], : plan.pending[row]].tolist() for row in spans}
    for row, span in spans.items():
        req = reqs[row]
        penalties = penalties_of(req, logits.shape[1])
        if penalties is not None:
            penalise(logits[span], penalties, req.output_ids, drafts[row])
        if req.grammar is not None:
            mask_logits(req, drafts[row], logits[span])
        if req.sampling_params.logit_bias:
            logits[span] += sampling_info.logit_bias[row]
    if sampling_info.has_custom_logit_processor:
        processed = {row: span for row, span in spans.items() if reqs[row].custom_logit_processor}
        _apply_custom_processors(processed, drafts, reqs, logits, sampling_info)
    for span in spans.values():
        # Rules can contradict each other. No sampler survives a row in which nothing is allowed, so
        # it becomes a uniform one; a grammar then ends its request with an error.
        nothing = logits[span].amax(dim=-1, keepdim=True) == -torch.inf
        logits[span].masked_fill_(nothing, 0.0)


def _has_rules(req: Any) -> bool:
    params = req.sampling_params
    return bool(
        req.grammar is not None
        or req.custom_logit_processor
        or params.logit_bias
        or params.min_new_tokens > 0
        or params.frequency_penalty
        or params.presence_penalty
        or params.repetition_penalty != 1.0
    )


def _spans(plan: StepPlan) -> dict[int, slice]:
    """Rows of the flat logits per row of the batch."""
    spans = {}
    first = 0
    for row in (*plan.draft_rows, *plan.verify_rows):
        spans[row] = slice(first, first + plan.q_lens[row])
        first += plan.q_lens[row]
    return spans


def penalties_of(req: Any, vocab: int) -> Penalties | None:
    """The penalties a request asks for; None if its logits stay as they are."""
    params = req.sampling_params
    shortest = params.min_new_tokens
    penalties = Penalties(
        frequency=params.frequency_penalty,
        presence=params.presence_penalty,
        repetition=params.repetition_penalty,
        min_new_tokens=shortest,
        stop_ids=_stop_ids(req, vocab) if shortest > 0 else (),
    )
    return penalties if penalties.of_output or shortest > 0 else None


def _stop_ids(req: Any, vocab: int) -> tuple[int, ...]:
    # The set that SGLang's BatchedMinNewTokensPenalizer forbids.
    ids = set(req.sampling_params.stop_token_ids or ())
    ids |= set(req.tokenizer.additional_stop_token_ids or ())
    if req.tokenizer.eos_token_id is not None:
        ids.add(req.tokenizer.eos_token_id)
    return tuple(sorted(token for token in ids if 0 <= token < vocab))


def _apply_custom_processors(
    spans: dict[int, slice],
    drafts: dict[int, list[int]],
    reqs: Sequence[Any],
    logits: torch.Tensor,
    sampling_info: Any,
) -> None:
    """Call each processor with the rows of equal depth: one row per request, as in plain decoding.

    A processor may look at its request's ``output_ids``, so the pending drafts before the depth
    stand there during the call.
    """
    lengths = {row: len(reqs[row].output_ids) for row in spans}
    try:
        for depth in range(max((len(drafts[row]) for row in spans), default=-1) + 1):
            at = {}
            for row, span in spans.items():
                flat = span.stop - 1 - len(drafts[row]) + depth
                if span.start <= flat < span.stop:
                    reqs[row].output_ids.extend(
                        drafts[row][len(reqs[row].output_ids) - lengths[row] : depth]
                    )
                    at[row] = flat
            for processor, mask in sampling_info.custom_logit_processor.values():
                rows = [row for row in at if mask[row]]
                if rows:
                    flat = torch.tensor([at[row] for row in rows], device=logits.device)
                    params = [sampling_info.custom_params[row] for row in rows]
                    logits[flat] = processor(logits[flat], params)
    finally:
        for row, length in lengths.items():
            del reqs[row].output_ids[length:]


def restore_penalties(reqs: Sequence[Any], sampling_info: Any) -> None:
    """Before a prefill: penalties of requests that come back with output after a retraction.

    SGLang starts their counts afresh, so the first token after the prefill would not be penalised
    and a stop token could be forbidden again.
    """
    for row, req in enumerate(reqs):
        if not req.output_ids:
            continue
        penalties = penalties_of(req, sampling_info.vocab_size)
        if penalties is None:
            continue
        additive, scaling = dense_terms(penalties, req.output_ids, sampling_info.vocab_size)
        sampling_info.acc_additive_penalties[row] = additive
        if sampling_info.acc_scaling_penalties is not None:
            sampling_info.acc_scaling_penalties[row] = scaling


def drop_penalizers(original: Callable[[Any], None], batch: Any) -> None:
    """AROUND ``ScheduleBatch.cumulate_penalty_output_tokens``: the running batch has no counters.

    A later merge with a freshly prefilled batch prepares them again, and the next step drops them.
    """
    if not is_aspire(get_server_args()):
        return original(batch)
    orchestrator = batch.sampling_info.penalizer_orchestrator
    for penalizer in orchestrator.penalizers.values():
        penalizer.teardown()
    orchestrator.is_required = False
    return None
