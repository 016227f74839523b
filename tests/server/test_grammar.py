"""Structured output at every position of a run (B15)."""

from __future__ import annotations

import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.server.client import request
from tests.server.conftest import DRAFTING, FULL, speculated
from tests.server.prompts import LOOP, PROSE
from tests.server.test_penalties import CONTEXTS, batch, ids, retracted

ASK = "Describe a person as JSON with name and age.\n"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 10, "maximum": 99},
        "kind": {"enum": ["sailor", "baker", "astronomer"]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}
PERSON = {"json_schema": json.dumps(SCHEMA)}
PHONE = {"regex": "[0-9]{3}-[0-9]{4}"}
ANSWER = {"ebnf": 'root ::= "yes, " reason\nreason ::= "it is late" | "I am very tired"'}
CALL = {
    "structural_tag": json.dumps(
        {
            "structures": [{"begin": "[person]", "schema": SCHEMA, "end": "[/person]"}],
            "triggers": ["[person]"],
            "at_least_one": True,
        }
    )
}


def check_person(text: str) -> None:
    person = json.loads(text)
    assert set(person) == {"name", "age", "kind"}
    assert isinstance(person["name"], str)
    assert 10 <= person["age"] <= 99
    assert person["kind"] in SCHEMA["properties"]["kind"]["enum"]
    assert text.rstrip() == text, "nothing may follow the closing brace"


def check(kind: dict, text: str) -> None:
    if kind is PERSON:
        check_person(text)
    elif kind is PHONE:
        assert re.fullmatch(PHONE["regex"], text), text
    elif kind is ANSWER:
        assert text in ("yes, it is late", "yes, I am very tired")
    else:
        calls = re.findall(r"\[person\](.*?)\[/person\]", text, re.DOTALL)
        assert calls, text
        for call in calls:
            check_person(call)


@pytest.mark.parametrize("context", CONTEXTS)
def test_structured_texts_are_plain_decodings_in_one_batch_with_others(plain, aspire, context):
    """B15: four kinds of grammar beside plain requests, each as if it were alone."""
    kinds = [(ASK, PERSON), (PROSE, PHONE), (PROSE, ANSWER), (ASK, CALL)]
    requests = [{"prompt": prompt, **kind, "max_new_tokens": 44} for prompt, kind in kinds]
    requests += [{"prompt": p, "max_new_tokens": 24, "ignore_eos": True} for p in (LOOP, PROSE)]
    expected = batch(plain, requests)
    aspire.configure(*CONTEXTS[context])
    found = batch(aspire, requests)
    for answer in found:
        speculated(answer)
    assert ids(found) == ids(expected)
    for a, b, (_, kind) in zip(expected, found, kinds, strict=False):
        assert b["text"] == a["text"]
        assert b["meta_info"]["finish_reason"] == a["meta_info"]["finish_reason"]
        check(kind, b["text"])
    if context == "accepting":
        # Drafts are legal: with full contexts nearly all are accepted.
        rates = [answer["meta_info"]["spec_accept_rate"] for answer in found]
        assert min(rates) > 0.85, rates


def test_sampled_texts_obey_their_grammar(aspire):
    """B15 at temperature 1: many samples beside sampled plain requests."""
    aspire.configure(DRAFTING)
    requests = [
        {"prompt": prompt, "n": 4, "temperature": 1.0, "max_new_tokens": 80, **kind}
        for prompt, kind in [(ASK, PERSON), (PROSE, PHONE), (PROSE, ANSWER), (PROSE, {})]
    ]
    found = batch(aspire, requests)
    for answers, kind in zip(found, (PERSON, PHONE, ANSWER), strict=False):
        speculated(answers)
        for answer in answers:
            assert answer["meta_info"]["finish_reason"]["type"] == "stop"
            check(kind, answer["text"])
    assert len({answer["text"] for answer in found[1]}) > 1


@pytest.mark.parametrize("cap", [1, 4, 8, 9, 30])
def test_the_end_of_the_grammar_inside_a_run(plain, aspire, cap):
    """B11, B15: with ignore_eos the grammar alone ends the text; the cap may come first."""
    aspire.configure(DRAFTING, FULL, {"scheduler": {"policy": "staggered", "gamma": 8}})
    options = {"max_new_tokens": cap, "ignore_eos": True, **PHONE}
    expected, found = plain.generate(PROSE, **options), aspire.generate(PROSE, **options)
    if cap > 1:
        speculated(found)
    if cap < 10:
        assert found["output_ids"] == expected["output_ids"]
        assert found["meta_info"]["finish_reason"] == expected["meta_info"]["finish_reason"]
        return
    # Without speculation SGLang notices the end one token late and emits a token after it.
    assert found["output_ids"] == expected["output_ids"][:-1]
    assert found["meta_info"]["finish_reason"]["type"] == "stop"
    check(PHONE, found["text"])


def test_json_of_the_openai_endpoint_streamed_and_not(plain, aspire):
    """B15: response_format, a second time from the grammar cache, and as a stream."""
    aspire.configure(DRAFTING)
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": ASK}],
        "max_tokens": 80,
        "temperature": 0,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "person", "schema": SCHEMA},
        },
    }
    path = "/v1/chat/completions"
    expected = plain.post(body, path).json()["choices"][0]["message"]["content"]
    check_person(expected)
    for _ in range(2):
        assert aspire.post(body, path).json()["choices"][0]["message"]["content"] == expected
    streamed = ""
    with aspire.http.stream("POST", path, json=body | {"stream": True}) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                streamed += json.loads(line[6:])["choices"][0]["delta"].get("content") or ""
    assert streamed == expected


def test_penalties_and_bias_act_together_with_a_grammar(plain, aspire):
    """The mask comes first, so no bias can lift it."""
    aspire.configure(DRAFTING)
    digit = aspire.ids("7")[0]
    options = {"max_new_tokens": 20, "frequency_penalty": 1.5, **PHONE}
    options["logit_bias"] = {str(digit): 4.0, "2000": 100}
    expected, found = plain.generate(PROSE, **options), aspire.generate(PROSE, **options)
    speculated(found)
    assert found["output_ids"] == expected["output_ids"]
    check(PHONE, found["text"])
    assert "7" in found["text"]


def test_retraction_keeps_the_state_of_the_grammar(plain, aspire):
    """B15, B21: prefilled again in the middle of its JSON."""
    aspire.configure(DRAFTING)
    expected = plain.generate(ASK, max_new_tokens=60, **PERSON)
    found = retracted(aspire, ASK, at=(5, 12), max_new_tokens=60, **PERSON)
    speculated(found)
    assert found["output_ids"] == expected["output_ids"]
    check(PERSON, found["text"])


def test_new_grammars_compile_while_others_run(plain, aspire):
    """B15: requests wait for their grammar, others run on, bad grammars get an answer."""
    aspire.configure(DRAFTING)
    expected = plain.generate(PROSE, max_new_tokens=30, ignore_eos=True)["output_ids"]
    requests = [{"prompt": PROSE, "max_new_tokens": 30, "ignore_eos": True}]
    new = [f"(note|remark) {number}: [a-z]{{{number},9}}\\." for number in range(2, 6)]
    requests += [{"prompt": PROSE, "regex": regex, "max_new_tokens": 24} for regex in new]
    killer = threading.Timer(0.5, lambda: aspire.post({"rid": "gone"}, "/abort_request"))
    killer.start()
    with ThreadPoolExecutor(8) as pool:
        body = request(ASK, rid="gone", max_new_tokens=2000, temperature=1.0, json_schema="{}")
        gone = pool.submit(aspire.post, body)
        bad = pool.submit(aspire.post, request(PROSE, max_new_tokens=8, regex="[0-9"))
        found = list(pool.map(lambda one: aspire.generate(**one), requests))
        theirs = plain.post(request(PROSE, max_new_tokens=8, regex="[0-9"))
        assert bad.result().status_code == theirs.status_code
        assert gone.result().status_code in (200, 400, 503)
    killer.join()
    speculated(found)
    assert found[0]["output_ids"] == expected
    for regex, answer in zip(new, found[1:], strict=True):
        assert re.fullmatch(regex, answer["text"]), answer["text"]
    aspire.wait_idle()
