"""How the outcome of a mixed step is handed to SGLang's result processing.

A row that only drafted has produced nothing yet. SGLang expects every row of a decode step to
produce at least one token, so it is shown only the rows that verified.
"""

from __future__ import annotations

import copy
from collections import Counter
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
_COUNTED = "aspire_counted"


class Verified(NamedTuple):
    """The verify rows of one step.

    Attributes:
        rows: batch index of each. The result's per-request tensors hold the rows of its steps one
            step behind the other.
        feedback: called with their accept lengths once those are on the host, and with which of
            them count: a request may have ended in an earlier step of the result.
    """

    rows: list[int]
    feedback: Callable[[list[int], list[bool]], None] | None = None


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
    if result.copy_done is not None:
        result.copy_done.synchronize()
    counted = _counted(parts, batch.reqs, result)
    first = 0
    for (rows, feedback), counts in zip(parts, counted, strict=True):
        if feedback is not None:
            feedback(result.accept_lens[first : first + len(rows)].tolist(), counts)
        first += len(rows)
    if first:
        verified = copy.copy(batch)
        verified.reqs = [batch.reqs[row] for row in _each_once(parts)]
        setattr(verified, _WHOLE_BATCH, batch)
        setattr(verified, _COUNTED, counted)
        original(processor, verified, result)
    return None


def join_runs(
    original: Callable[..., list[list[int]]], processor: Any, result: Any, batch: Any
) -> list[list[int]]:
    """AROUND ``_resolve_spec_v2_tokens``: a request that verified in several steps of one result
    is shown one run of tokens, and its counters every verify."""
    parts: list[Verified] | None = getattr(result, VERIFIED, None)
    if parts is None or len(parts) == 1:
        return original(processor, result, batch)
    reqs, reporter = getattr(batch, _WHOLE_BATCH).reqs, processor.metrics_reporter
    runs: dict[int, list[int]] = {row: [] for row in _each_once(parts)}
    first = capped = verifies = 0
    for (rows, _), counts in zip(parts, getattr(batch, _COUNTED), strict=True):
        places = list(compress(range(first, first + len(rows)), counts))
        first += len(rows)
        if not places:
            continue
        some, rows = copy.copy(batch), list(compress(rows, counts))
        some.reqs = [reqs[row] for row in rows]
        shown = _rows_of(result, places)
        for row, run in zip(rows, original(processor, shown, some), strict=True):
            runs[row] += run
        capped += shown.num_cap_tokens
        verifies += len(rows)
    # SGLang counts a verify, and a token of its own, for each request that it is shown.
    reporter.spec_num_forward_ct += verifies - len(runs)
    result.num_correct_drafts = sum(map(len, runs.values())) - len(runs)
    result.num_cap_tokens = capped
    return list(runs.values())


def _each_once(parts: list[Verified]) -> list[int]:
    """Batch rows that verified, in the order in which they first did."""
    return list(dict.fromkeys(row for part in parts for row in part.rows))


def _counted(parts: list[Verified], reqs: list[Any], result: Any) -> list[list[bool]]:
    """Per step and verify row, whether its request went on after the steps before."""
    # Steps that a request has behind the one looked at.
    further = Counter(row for part in parts for row in part.rows)
    if max(further.values(), default=0) <= 1:
        return [[True] * len(part.rows) for part in parts]
    stride, lens = result.speculative_num_draft_tokens, result.accept_lens.tolist()
    tokens = result.next_token_ids.tolist()
    runs: dict[int, list[int]] = {}
    ended: set[int] = set()
    counted, place = [], 0
    for rows, _ in parts:
        counted.append([row not in ended for row in rows])
        for row in rows:
            further[row] -= 1
            run = tokens[place * stride : place * stride + lens[place]]
            if further[row] and row not in ended:
                before = runs.setdefault(row, [])
                if _ends(reqs[row], before, run):
                    ended.add(row)
                before += run
            place += 1
    return counted


def _ends(req: Any, before: list[int], run: list[int]) -> bool:
    """Whether a request ends within ``run``, by SGLang's own rules for strings and tokens.

    Nothing of the request is changed.

    Args:
        before: tokens of the same result that go before.
    """
    known, count = (req.finished_reason, req.finished_len), len(req.output_ids)
    req.output_ids.extend(before + run)
    try:
        return bool(req._check_str_based_finish(len(run)) or req._check_token_based_finish(run))
    finally:
        del req.output_ids[count:]
        req.finished_reason, req.finished_len = known


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

    SGLang asks for the length cap, then for stop strings in the order of the request, then for stop
    tokens: right for one token at a time, but a later stop of a run could win. So where a run ends
    the text, its tokens are looked at one by one, as plain decoding would.
    """
    whole = new_accepted_len == 1 or req.finished() or req.to_finish
    original(req, new_accepted_len)
    if whole or not is_aspire(get_server_args()):
        return
    # An expression may hold for part of a run, and no longer for all of it.
    if not (req.finished() or req.sampling_params.stop_regex_strs):
        return
    req.finished_reason = req.finished_len = None
    ids, grammar = req.output_ids, req.grammar
    run = ids[len(ids) - new_accepted_len :]
    del ids[len(ids) - new_accepted_len :]
    for place, token in enumerate(run, start=1):
        ids.append(token)
        # The run was cut where its grammar ended.
        req.grammar = grammar if place == new_accepted_len else None
        original(req, 1)
        if req.finished():
            break
    req.grammar = grammar
    if req.finished() and req.finished_len is None:
        req.finished_len = len(ids)
    ids.extend(run[place:])
