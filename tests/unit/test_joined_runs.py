"""Where a request ends within several verifies of one result, by SGLang's own rules."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("sglang.srt.speculative.base_spec_worker")

from sglang.srt.managers.schedule_batch import Req

from aspire_sglang.runtime.results import Verified, _counted

STRIDE = 8


class Tokenizer:
    """A token a character."""

    eos_token_id = ord("!")
    additional_stop_token_ids = None

    def decode(self, ids):
        return "".join(map(chr, ids))


def request(text: str, stop=(), regex=(), ignore_eos=False) -> Req:
    req = Req.__new__(Req)
    req.output_ids = [ord(c) for c in text]
    req.decoded_text, req.tokenizer = "", Tokenizer()
    req.eos_token_ids = None
    req.finished_reason = req.finished_len = None
    req.sampling_params = SimpleNamespace(
        stop_strs=list(stop),
        stop_regex_strs=list(regex),
        stop_str_max_len=max(map(len, stop), default=0),
        stop_regex_max_len=4 if regex else 0,
        stop_token_ids=None,
        ignore_eos=ignore_eos,
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
    before = list(req.output_ids)
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
