"""How the outcome of a mixed step is handed to SGLang's result processing.

A row that only drafted has produced nothing yet. SGLang expects every row of a decode step to
produce at least one token, so it is shown only the rows that verified.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from itertools import compress
from typing import Any, NamedTuple

from sglang.srt.runtime_context import get_server_args

from aspire_sglang.runtime.arguments import is_aspire
from aspire_sglang.runtime.logprobs import mend_listed
from aspire_sglang.runtime.plain_steps import PLAIN_PHASE

VERIFIED = "aspire_verified"
"""Attribute of a ``GenerationBatchResult``: its :class:`Verified` parts."""

_WHOLE_BATCH = "aspire_whole_batch"


class Verified(NamedTuple):
    """Verify rows that SGLang is shown together; no request is among them twice.

    Attributes:
        rows: batch index of each. The result's per-request tensors hold the rows of its parts one
            part behind the other.
        feedback: called with their accept lengths once those are on the host.
    """

    rows: list[int]
    feedback: Callable[[list[int]], None] | None = None


def process_verified_rows(
    original: Callable[..., None], processor: Any, batch: Any, result: Any
) -> None:
    """AROUND ``process_batch_result_decode``: process only the rows that verified."""
    phase = getattr(result, PLAIN_PHASE, None)
    if phase is not None:
        mend_listed(batch, result.logits_output)
        return phase.owner.process(phase, batch, result, partial(original, processor))
    parts: list[Verified] | None = getattr(result, VERIFIED, None)
    if parts is None:
        return original(processor, batch, result)
    first = 0
    for part in parts:
        rows, stop = part.rows, first + len(part.rows)
        if part.feedback is not None:
            result.copy_done.synchronize()
            part.feedback(result.accept_lens[first:stop].tolist())
        places = list(range(first, stop))
        if first > 0:
            # Whoever ended in the part before has nothing to come.
            kept = [not batch.reqs[row].finished() for row in rows]
            rows, places = list(compress(rows, kept)), list(compress(places, kept))
        if rows:
            verified = copy.copy(batch)
            verified.reqs = [batch.reqs[row] for row in rows]
            setattr(verified, _WHOLE_BATCH, batch)
            shown = result if len(parts) == 1 else _rows_of(result, places)
            original(processor, verified, shown)
        first = stop
    return None


def _rows_of(result: Any, places: list[int]) -> Any:
    """A copy of ``result`` with some rows of its per-request tensors."""
    some = copy.copy(result)
    tokens = result.next_token_ids.view(-1, result.speculative_num_draft_tokens)
    some.next_token_ids = tokens[places].flatten()
    some.accept_lens, some.cap_lens = result.accept_lens[places], result.cap_lens[places]
    return some


def report_whole_batch(
    original: Callable[..., None],
    reporter: Any,
    can_run_cuda_graph: bool,
    running_batch: Any = None,
    num_correct_drafts: int = 0,
) -> None:
    """AROUND ``report_decode_stats``: show the batch that ran, not its verified rows.

    A plain step counts as a verify of no drafts. SGLang would not count it, and divides by the
    number of verifies since its last report.
    """
    whole = getattr(running_batch, _WHOLE_BATCH, running_batch)
    if running_batch.spec_algorithm.is_none() and not reporter.scheduler.spec_algorithm.is_none():
        reporter.spec_num_accept_tokens += len(running_batch.reqs)
        reporter.spec_num_forward_ct += len(running_batch.reqs)
    original(
        reporter,
        can_run_cuda_graph,
        running_batch=whole,
        num_correct_drafts=num_correct_drafts,
    )


def finish_at_first_condition(
    original: Callable[..., None], req: Any, new_accepted_len: int = 1
) -> None:
    """AROUND ``Req.update_finish_state``: within one accepted run, what comes first wins.

    SGLang asks for the length cap before it looks for stop tokens and strings, which is right for
    one token at a time; a run that reaches the cap may hold a stop before it.
    """
    sampling = req.sampling_params
    cap = sampling.max_new_tokens
    reaches_cap = new_accepted_len > 1 and len(req.output_ids) >= cap
    if not reaches_cap or req.finished() or req.to_finish or not is_aspire(get_server_args()):
        return original(req, new_accepted_len)
    sampling.max_new_tokens = len(req.output_ids) + 1
    try:
        original(req, new_accepted_len)
    finally:
        sampling.max_new_tokens = cap
    end = req.finished_len
    if end is None and req.grammar is not None and req.grammar.is_terminated():
        # The run was cut where its grammar ended, which is not before the cap.
        end = len(req.output_ids)
    if req.finished() and (end is None or end < cap):
        return None
    req.finished_reason = req.finished_len = None
    return original(req, new_accepted_len)
