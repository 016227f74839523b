"""The demo's figures: merging server statistics, speeds, consistency, the report's schema."""

from __future__ import annotations

import json

import pytest
from pydantic import ValidationError

from aspire_sglang.cli.texts import Prompt
from bench import stats
from bench.answer import Answer, decode_speed
from bench.report import Report, build_report
from bench.rescore import gaps, is_consistent, tau
from bench.rounds import Request, Round
from bench.stats import Speculation, Steps

ABOUT = {
    "machine": {"cpu": "a processor", "cores": 2},
    "versions": {"python": "3.12.1"},
    "commit": None,
    "date": "2026-01-01T00:00:00+00:00",
    "command": "python bench/demo.py",
    "server_flags": {"plain": [], "aspire": ["--speculative-algorithm", "ASPIRE"]},
}


def answer(arrivals, text="text", ids=(1, 2), rid="r", **meta):
    return Answer(
        rid=rid,
        prompt_ids=[0] * 10,
        text=text,
        output_ids=list(ids),
        prompt_tokens=10,
        completion_tokens=arrivals[-1][1],
        meta_info=meta,
        arrivals=arrivals,
    )


def request(door="/generate"):
    return Request(door, Prompt("code", "source of re", "import re" * 100, (0,) * 10))


# --- speeds -------------------------------------------------------------------------------------


def test_decode_speed_counts_from_the_last_first_token():
    early = answer([(0.0, 1), (1.0, 5), (3.0, 9)])
    late = answer([(1.0, 1), (2.0, 3), (5.0, 13)])
    # From 1.0 to 5.0: 9 - 5 tokens of the early answer, 13 - 1 of the late one.
    assert decode_speed([early, late]) == pytest.approx(16 / 4)
    assert late.tokens_per_s == pytest.approx(12 / 4)


def test_speeds_of_single_event_answers_are_zero():
    assert decode_speed([answer([(1.0, 1)])]) == 0.0
    assert answer([(1.0, 1)]).tokens_per_s == 0.0


# --- server statistics --------------------------------------------------------------------------

FROM_META = {"draft_steps": 7, "verify_steps": 3, "draft_lengths": {"3": 2, "1": 1}}


def test_speculation_prefers_meta_info():
    got = stats.speculation({}, answer([(0, 9)], aspire=FROM_META, spec_accept_length=2.5))
    assert got == Speculation(7, 3, {1: 1, 3: 2}, 2.5)
    assert list(got.draft_lengths) == [1, 3]
    assert got.mean_draft_length == pytest.approx(7 / 3)


def test_speculation_of_an_openai_answer_comes_from_server_info():
    block = {"requests": {"r": {**FROM_META, "draft_length_sequence": [3, 1, 3]}}}
    got = stats.speculation(block, answer([(0, 9)]))
    # SGLang's definition, since the server does not send the figure: completion tokens per verify.
    assert got.accept_length == pytest.approx(9 / 3)
    assert got.sequence == (3, 1, 3)


def test_speculation_of_an_unknown_request_is_an_error():
    with pytest.raises(LookupError, match="request r"):
        stats.speculation({"requests": {}}, answer([(0, 9)]))


def test_a_request_of_one_token_has_no_verify():
    nothing = {"draft_steps": 0, "verify_steps": 0, "draft_lengths": {}}
    got = stats.speculation({}, answer([(0, 1)], aspire=nothing))
    assert (got.accept_length, got.mean_draft_length) == (0.0, 0.0)


def test_steps_are_the_difference_of_two_totals():
    earlier = stats.steps({"decode_steps": 10, "mixed_step_fraction": 0.2})
    later = stats.steps({"decode_steps": 50, "mixed_steps": 32, "mixed_step_fraction": 0.64})
    assert later - earlier == Steps(decode=40, mixed=30)
    assert (later - earlier).mixed_fraction == pytest.approx(0.75)
    assert stats.steps({}).mixed_fraction == 0.0


# --- greedy consistency -------------------------------------------------------------------------


def test_gaps_are_taken_at_the_output_tokens():
    meta = {
        "input_token_logprobs": [[None, 5, None], [-0.5, 6, None], [-2.0, 7, None]],
        "input_top_logprobs": [None, [[-0.5, 6, None]], [[-1.25, 8, None]]],
    }
    assert gaps(meta, [6, 7]) == pytest.approx([0.0, 0.75])
    with pytest.raises(ValueError, match="other tokens"):
        gaps(meta, [6, 9])


def test_tau_follows_plain_decoding_within_bounds():
    assert tau([[0.0, 0.002], [0.001]], "float32") == pytest.approx(0.003)
    assert tau([[0.0]], "float32") == 1e-3
    assert tau([[9.0]], "float32") == 1e-2
    assert tau([[0.2]], "bfloat16") == pytest.approx(0.3)


def test_an_answer_that_was_not_scored_is_not_consistent():
    assert is_consistent([0.0, 0.001], 0.001)
    assert not is_consistent([0.0, 0.002], 0.001)
    assert not is_consistent([], 0.001)


# --- the report ---------------------------------------------------------------------------------


def example() -> Report:
    plain = [answer([(0.0, 1), (10.0, 21)]), answer([(0.0, 1), (10.0, 21)], text="other")]
    aspire = [answer([(0.0, 1), (4.0, 21)]), answer([(0.0, 1), (5.0, 21)])]
    return build_report(
        [request(), request("sgl.function")],
        plain=(Round(plain, 20.0), Round(plain, 10.0)),
        aspire=(Round(aspire, 21.0), Round(aspire, 5.0)),
        speculation=[Speculation(12, 4, {3: 4}, 5.25), Speculation(0, 20, {0: 20}, 1.05)],
        steps=Steps(decode=16, mixed=4),
        gaps=[[0.0, 0.0], [0.0, 0.5]],
        tau=0.001,
        about=ABOUT,
    )


def test_report_figures():
    report = example()
    assert report.mixed_step_fraction == 0.25
    assert (report.greedy_consistent.n, report.greedy_consistent.of) == (1, 2)
    assert (report.identical.n, report.identical.of) == (1, 2)
    assert (report.tokens_per_s.plain, report.tokens_per_s.aspire) == (4.0, 8.0)
    assert report.speedup == 2.0
    assert report.tokens_per_s_end_to_end.plain == pytest.approx(42 / 30, abs=0.01)
    first, second = report.requests
    assert (first.mean_draft_length, second.mean_draft_length) == (3.0, 0.0)
    assert first.identical
    assert not second.identical
    assert second.largest_gap == 0.5
    assert first.tokens_per_s.aspire == 5.0


def test_report_survives_json_and_has_the_promised_fields():
    report = example()
    data = json.loads(report.model_dump_json())
    promised = {"mixed_step_fraction", "greedy_consistent", "identical", "tokens_per_s", "requests"}
    assert promised <= set(data)
    per_request = {"accept_length", "draft_lengths", "mean_draft_length", "door", "kind", "text"}
    assert per_request <= set(data["requests"][0])
    assert data["requests"][0]["draft_lengths"] == {"3": 4}
    assert Report.model_validate(data) == report


def test_report_refuses_unknown_fields_and_unequal_rounds():
    with pytest.raises(ValidationError):
        Report.model_validate({**example().model_dump(), "speed": 1})
    with pytest.raises(ValueError, match="zip"):
        build_report(
            [request()],
            plain=(Round([], 1.0), Round([answer([(0, 1)])] * 2, 1.0)),
            aspire=(Round([], 1.0), Round([answer([(0, 1)])], 1.0)),
            speculation=[],
            steps=Steps(1, 0),
            gaps=[],
            tau=0.1,
            about=ABOUT,
        )
