"""Requests that a GPU decodes plainly, in SGLang's real scheduler, with and without overlap.

The servers run on the CPU with :mod:`tests.server.phases_plugin`, which lets the CPU's worker
follow the GPU's rules; a GPU runs the same code. Plain decoding overlaps where ASPIRE does: there
SGLang's penalties see a text one token late.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aspire_sglang.cli.server import Server, plain_args
from tests.server import phases_plugin
from tests.server.client import Client, request
from tests.server.conftest import CHECKS, COMMON, START_SECONDS, Aspire, serving
from tests.server.prompts import COUNT, LOOP, PROSE, SHORT
from tests.server.test_grammar import ANSWER, ASK, CALL, PERSON, PHONE, check
from tests.server.test_logprobs import TOLERANCE, values
from tests.server.test_penalties import forbid_repeats

pytestmark = pytest.mark.slow

SETTINGS = "{cost_profile: false, gamma_max: 16, scheduler: {policy: fixed, gamma: 3}}"
SIZES = {"max_total_tokens": 8000, "max_running_requests": 8}
ROOT = Path(__file__).resolve().parents[2]

COMMON_PART = {"max_new_tokens": 24, "ignore_eos": True}
OTHERS = SHORT[:3]
OTHERS_LENGTH = 420
LISTED = [5, 700]

# Grammars that end by themselves.
STRUCTURED = {"json_schema": (ASK, PERSON), "regex": (PROSE, PHONE), "ebnf": (PROSE, ANSWER)}
STRUCTURED |= {"structural_tag": (ASK, CALL)}
CASES: dict[str, dict[str, Any]] = {
    "frequency_penalty": {"prompt": LOOP, "frequency_penalty": 1.5},
    "presence_penalty": {"prompt": PROSE, "presence_penalty": 1.5},
    "repetition_penalty": {"prompt": LOOP, "repetition_penalty": 1.3},
    "min_new_tokens": {
        "prompt": COUNT,
        "min_new_tokens": 12,
        "ignore_eos": False,
        "max_new_tokens": 30,
    },
    "logit_bias": {"prompt": LOOP},
    **{
        name: {"prompt": prompt, "max_new_tokens": 48, "ignore_eos": False, **kind}
        for name, (prompt, kind) in STRUCTURED.items()
    },
    "custom_logit_processor": {
        "prompt": LOOP,
        "custom_logit_processor": forbid_repeats(),
        "custom_params": {"window": 4},
    },
    "return_logprob": {
        "prompt": COUNT,
        "return_logprob": True,
        "logprob_start_len": 2,
        "top_logprobs_num": 3,
        "token_ids_logprob": LISTED,
        "temperature": 0.0,
    },
    "return_hidden_states": {"prompt": COUNT, "return_hidden_states": True},
}


@pytest.fixture(scope="module", params=["", "1"], ids=["in-turn", "overlap"])
def pair(
    request: pytest.FixtureRequest, model: Path, logs: Path, tokenizer: Any
) -> Iterator[tuple[Client, Aspire, dict[str, Any]]]:
    """Plain decoding, ASPIRE by the GPU's rules, and what plain decoding answers to each case."""
    name = "parameters-overlap" if request.param else "parameters"
    folder = logs / name
    phases_plugin.install(folder)
    places = [str(folder), str(ROOT), os.environ.get("PYTHONPATH", "")]
    env = {
        **CHECKS,
        "PYTHONPATH": os.pathsep.join(place for place in places if place),
        "PHASES_OVERLAP": request.param,
        "PHASES_GPU_RULES": "1",
    }
    args = plain_args(model, extra=COMMON, **SIZES)
    log = logs / f"{name}-plain.log"
    with (
        Server(args, log=log, name="plain server", env=env, timeout_s=START_SECONDS) as running,
        serving(args, name, logs, tokenizer, settings=SETTINGS, env=env) as ours,
    ):
        plain = Client(running, False, tokenizer)
        free = plain.generate(COUNT, **COMMON_PART)["output_ids"]
        # The stop token comes before the least length, and again after it.
        stop = next(token for token in free[:8] if token in free[14:])
        CASES["min_new_tokens"]["stop_token_ids"] = [stop]
        banned = plain.generate(LOOP, **COMMON_PART)["output_ids"][3]
        CASES["logit_bias"]["logit_bias"] = {str(banned): -100, "2000": 3.0}
        yield plain, ours, {name: plain.generate(**case(name)) for name in CASES}


@pytest.fixture
def ours(pair: tuple[Client, Aspire, dict[str, Any]]) -> Iterator[Aspire]:
    with pair[1].judged() as client:
        yield client


def case(name: str) -> dict[str, Any]:
    return {**COMMON_PART, **CASES[name]}


@contextmanager
def others(client: Aspire) -> Iterator[list[Any]]:
    """Requests without parameters that speculate meanwhile; their answers are in the list."""
    before = client.aspire()["draft_rows"]
    answers: list[Any] = []
    with ThreadPoolExecutor(len(OTHERS)) as pool:
        options = {"max_new_tokens": OTHERS_LENGTH, "ignore_eos": True}
        jobs = [pool.submit(client.generate, prompt, **options) for prompt in OTHERS]
        deadline = time.monotonic() + 60
        while client.aspire()["draft_rows"] < before + 20:
            assert time.monotonic() < deadline, "nobody speculates"
            time.sleep(0.05)
        yield answers
        answers += [job.result() for job in jobs]


def assert_equal(name: str, found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["output_ids"] == expected["output_ids"], (name, found["text"], expected["text"])
    ours, theirs = found["meta_info"], expected["meta_info"]
    assert ours["finish_reason"] == theirs["finish_reason"]
    if name in STRUCTURED:
        check(STRUCTURED[name][1], found["text"])
    if name == "return_logprob":
        for side in ("input", "output"):
            for kind in ("token", "top", "token_ids"):
                key = f"{side}_{kind}_logprobs"
                expect = pytest.approx(values(theirs[key]), abs=TOLERANCE)
                assert len(ours[key]) == len(theirs[key])
                assert values(ours[key]) == expect, key
    if name == "return_hidden_states":
        states, want = ours["hidden_states"], theirs["hidden_states"]
        assert len(states) == len(want) == len(found["output_ids"])
        for a, b in zip(states, want, strict=True):
            a, b = np.atleast_2d(a)[-1], np.atleast_2d(b)[-1]
            np.testing.assert_allclose(a, b, atol=1e-2, rtol=1e-3)


def assert_told(name: str, answer: dict[str, Any]) -> None:
    told = answer["meta_info"]["aspire"]
    assert (told["speculation"], told["speculated"]) == ("off by parameter", False), told
    assert name in told["reason"]
    # One token is the prefill's.
    assert told["verify_steps"] == len(answer["output_ids"]) - 1


@pytest.mark.parametrize("name", CASES)
def test_alone(pair, ours, name):
    before = ours.aspire()
    found = ours.generate(**case(name))
    assert_equal(name, found, pair[2][name])
    assert_told(name, found)
    after = ours.aspire()
    assert after["draft_rows"] == before["draft_rows"]
    steps = after["plain_steps_for_parameters"] - before["plain_steps_for_parameters"]
    assert 0 <= steps - (len(found["output_ids"]) - 1) <= 1


def test_beside_requests_that_speculate(pair, ours):
    plain, _, expected = pair
    with others(ours) as answers:
        for name in CASES:
            found = ours.generate(**case(name))
            assert_equal(name, found, expected[name])
            assert_told(name, found)
        after = ours.aspire()
    length = {"max_new_tokens": OTHERS_LENGTH, "ignore_eos": True}
    theirs = plain.generate_all(OTHERS, **length)
    assert [a["output_ids"] for a in answers] == [a["output_ids"] for a in theirs]
    for answer in answers:
        told = answer["meta_info"]["aspire"]
        assert (told["speculation"], told["reason"]) == ("on", None)
        assert told["speculated"]
        # Plain steps were taken with the others, and all tokens are counted.
        assert int(told["draft_lengths"]["0"]) > 20
    assert ours.aspire()["accepted_drafts"] > after["accepted_drafts"], "nobody speculates again"


def test_all_at_once(pair, ours):
    """Parameters that do not lag behind the text, of several requests at a time."""
    names = [*STRUCTURED, "logit_bias", "return_logprob", "return_hidden_states"]
    with others(ours), ThreadPoolExecutor(5) as pool:
        found = list(pool.map(lambda name: ours.generate(**case(name)), names))
    for name, answer in zip(names, found, strict=True):
        assert_equal(name, answer, pair[2][name])


def test_one_token_with_its_logprob(pair, ours):
    """It ends with its prefill, but with overlap scheduling it is in the next step, too."""
    plain = pair[0]
    options = {"max_new_tokens": 1, "return_logprob": True, "top_logprobs_num": 2}
    with others(ours):
        for prompt in (COUNT, PROSE):
            found = ours.generate(prompt, **options)["meta_info"]
            expected = plain.generate(prompt, **options)["meta_info"]
            theirs = values(expected["output_token_logprobs"])
            assert values(found["output_token_logprobs"]) == pytest.approx(theirs, abs=TOLERANCE)


def test_samples_obey_their_grammar_and_carry_logprobs(ours):
    options = {"max_new_tokens": 60, "temperature": 1.0, "return_logprob": True}
    with others(ours), ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(ours.generate, PROSE, **options, **PHONE) for _ in range(4)]
        found = [job.result() for job in jobs]
    for answer in found:
        check(PHONE, answer["text"])
        logprobs = answer["meta_info"]["output_token_logprobs"]
        assert [token for _, token, *_ in logprobs] == answer["output_ids"]
    assert len({answer["text"] for answer in found}) > 1


def test_aborted_ones_let_the_others_go_on(ours):
    def steps() -> int:
        return ours.aspire()["plain_steps_for_parameters"]

    with others(ours), ThreadPoolExecutor(1) as pool:
        before = steps()
        body = request(LOOP, max_new_tokens=3000, ignore_eos=True, return_logprob=True, rid="gone")
        gone = pool.submit(ours.post, body)
        time.sleep(1)
        ours.post({"rid": "gone"}, "/abort_request")
        gone.result()
        after, drafted = steps(), ours.aspire()["draft_rows"]
        assert after > before
    assert steps() - after <= 1
    assert ours.aspire()["draft_rows"] > drafted
