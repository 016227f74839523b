"""Where a request ends within several verifies of one result, by SGLang's own rules."""

from __future__ import annotations

from array import array
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("sglang.srt.speculative.base_spec_worker")

from sglang.srt.managers.schedule_batch import Req

from aspire_sglang.runtime import results
from aspire_sglang.runtime.results import Verified, _counted, finish_at_first_condition

STRIDE = 8


class Tokenizer:
    """A token a character."""

    eos_token_id = ord("!")
    additional_stop_token_ids = None

    def decode(self, ids):
        return "".join(map(chr, ids))


def request(text: str, stop=(), regex=(), ignore_eos=False) -> Req:
    req = Req.__new__(Req)
    req.output_ids = array("q", map(ord, text))
    req.decoded_text, req.tokenizer = "", Tokenizer()
    req.eos_token_ids = req.grammar = req.to_finish = None
    req.vocab_size = 1000
    req.finished_reason = req.finished_len = None
    req.sampling_params = SimpleNamespace(
        stop_strs=list(stop),
        stop_regex_strs=list(regex),
        stop_str_max_len=max(map(len, stop), default=0),
        stop_regex_max_len=4 if regex else 0,
        stop_token_ids=None,
        ignore_eos=ignore_eos,
        max_new_tokens=30,
    )
    return req


def counted(req: Req, *runs: str) -> list[bool]:
    tokens = torch.zeros(len(runs), STRIDE, dtype=torch.int64)
    for place, run in enumerate(runs):
        tokens[place, : len(run)] = torch.tensor([ord(c) for c in run])
    result = SimpleNamespace(
        next_token_ids=tokens.flatten(),
        accept_lens=torch.tensor([len(run) for run in runs]),
        speculative_num_draft_tokens=STRIDE,
    )
    before = req.output_ids[:]
    found = _counted([Verified([0]) for _ in runs], [req], result)
    assert req.output_ids == before
    assert (req.finished_reason, req.finished_len) == (None, None)
    return [one for (one,) in found]


@pytest.mark.parametrize(
    ("req", "runs", "wanted"),
    [
        (request("x"), ("abc", "d", "ef"), [True, True, True]),
        (request("x"), ("ab!", "d", "ef"), [True, False, False]),
        (request("x", ignore_eos=True), ("ab!", "d", "ef"), [True, True, True]),
        # Whatever the order of the strings.
        (request("x", stop=["B", "A"]), (".A", ".B"), [True, False]),
        (request("x", stop=["A", "B"]), ("..", ".A", ".B"), [True, True, False]),
        (request("x", stop=["B"], regex=["[0-9]"]), (".1", ".B"), [True, False]),
        # A string that began before.
        (request("xS", stop=["STOP"]), ("TO", "P", "b"), [True, True, False]),
    ],
)
def test_nothing_behind_an_end_counts(req, runs, wanted):
    assert counted(req, *runs) == wanted


@pytest.mark.parametrize(
    "options",
    [
        {"stop": ["B", "A"]},
        {"stop": ["AB", "A"]},
        {"stop": ["B"], "regex": ["A"]},
        {"stop": ["C", "B", "Z"]},
        {"regex": ["C", "A."]},
        # Holds at the end of a text alone.
        {"regex": ["A$"]},
        {"stop": ["C"]},
        {"stop": ["c!"], "ignore_eos": True},
        {},
    ],
    ids=str,
)
@pytest.mark.parametrize("run", ["abABCc!d", "xyz", "bc!ABC", "C", "AB", "a" * 29 + "A", "a" * 40])
def test_a_run_ends_where_single_tokens_would_end(monkeypatch, options, run):
    monkeypatch.setattr(results, "is_aspire", lambda args: True)
    monkeypatch.setattr(results, "get_server_args", lambda: None)
    original = Req.update_finish_state
    monkeypatch.setattr(Req, "finished", lambda req: req.finished_reason is not None)
    one, whole = request("x", **options), request("x", **options)
    for token in map(ord, run):
        one.output_ids.append(token)
        original(one, 1)
        if one.finished():
            break
    whole.output_ids.extend(map(ord, run))
    finish_at_first_condition(original, whole, len(run))
    assert whole.output_ids == array("q", map(ord, "x" + run))
    assert whole.finished() == one.finished()
    assert whole.output_ids_through_stop == one.output_ids_through_stop
    if one.finished():
        assert whole.finished_reason.to_json() == one.finished_reason.to_json()
