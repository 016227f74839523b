"""Requests that decode in plain steps on a GPU, against stock fa3: alone, and beside requests that
speculate on long contexts.

Takes about two minutes, most of which are the starts of two engines. The model comes from the
package index, or from ``ASPIRE_TEST_MODEL``.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

pytest.importorskip("sglang")

from sglang.srt.sampling.custom_logit_processor import DisallowedTokensLogitsProcessor

from bench import gpu_engine, gpu_exact

# As in test_engine.py: two bfloat16 logits so far apart are undecided.
TAU = 0.26
COUNT = "Count: 1, 2, 3, 4, 5, 6, 7, 8,"
LOOP = "one two three four " * 30
PROSE = "Write a short story about a lighthouse keeper."
ASK = "Describe a person as JSON with name and age.\n"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 10, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
TAG = {
    "structures": [{"begin": "[person]", "schema": SCHEMA, "end": "[/person]"}],
    "triggers": ["[person]"],
    "at_least_one": True,
}
STRUCTURED: dict[str, dict[str, Any]] = {
    "json_schema": {"prompt": ASK, "json_schema": json.dumps(SCHEMA)},
    "regex": {"prompt": PROSE, "regex": "[0-9]{3}-[0-9]{4}"},
    "ebnf": {"prompt": PROSE, "ebnf": 'root ::= "yes, it is late" | "yes, I am tired"'},
    "structural_tag": {"prompt": ASK, "structural_tag": json.dumps(TAG)},
}
NAMES = [
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "min_new_tokens",
    "logit_bias",
    *STRUCTURED,
    "custom_logit_processor",
    "return_logprob",
    "return_hidden_states",
]
PLACES = ("alone", "beside")
OTHERS, OTHERS_LENGTH, LENGTH = 8, 1400, 32


def asked(prompt: str, fields: dict[str, Any] | None = None, **sampling: Any) -> dict[str, Any]:
    """Arguments of ``Engine.generate``."""
    params = {"max_new_tokens": LENGTH, "temperature": 0.0, "ignore_eos": True, **sampling}
    return {"prompt": prompt, "sampling_params": params, **(fields or {})}


def requests(free: dict[str, list[int]]) -> dict[str, dict[str, Any]]:
    """A request for each parameter; ``free``: stock's texts without any."""
    # The stop token comes before the least length, and again after it.
    count = free[COUNT]
    stop = next((t for t in count[:12] if t in count[16:]), count[4])
    fields: dict[str, Any] = {"return_logprob": True, "logprob_start_len": 2}
    fields |= {"top_logprobs_num": 3, "token_ids_logprob": [5, 700]}
    processor = {"custom_logit_processor": DisallowedTokensLogitsProcessor.to_str()}
    banned = sorted(set(free[LOOP][:8]))
    found = {
        "frequency_penalty": asked(LOOP, frequency_penalty=2.0),
        "presence_penalty": asked(PROSE, presence_penalty=2.0),
        "repetition_penalty": asked(LOOP, repetition_penalty=1.3),
        "min_new_tokens": asked(COUNT, min_new_tokens=14, stop_token_ids=[stop], ignore_eos=False),
        "logit_bias": asked(LOOP, logit_bias={str(banned[0]): -100, "2000": 3.0}),
        **{
            name: asked(ignore_eos=False, **{**given, "max_new_tokens": 60})
            for name, given in STRUCTURED.items()
        },
        "custom_logit_processor": asked(LOOP, processor, custom_params={"token_ids": banned}),
        "return_logprob": asked(COUNT, fields),
        "return_hidden_states": asked(COUNT, {"return_hidden_states": True}),
    }
    assert list(found) == NAMES
    return found


@dataclass
class Found:
    """What the engines answered."""

    free: dict[str, list[int]]
    stock: dict[str, Any]
    ours: dict[str, dict[str, Any]]
    others: list[Any]
    stock_others: list[Any]
    stock_gaps: list[float]
    gaps: list[float]
    running: list[int]
    counters: list[dict[str, int]]
    scored: list[Any]
    seed: str


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    model = os.environ.get("ASPIRE_TEST_MODEL")
    if model is None:
        from bench.smollm2 import model_path

        model = str(model_path())
    folder = tmp_path_factory.mktemp("parameters")
    names = ("stock_parameters", "parameters")
    engines = [gpu_engine.Variant(name, model, 0, folder) for name in names]
    try:
        prompts = gpu_engine.load_prompts(model, OTHERS, 6000)
        for engine in engines:
            print(engine.name, engine.receive(240.0))
            assert engine.alive, engine.log.read_text(errors="replace")[-6000:]
        return measure(*engines, prompts)
    finally:
        for engine in engines:
            engine.process.kill()


def measure(stock: Any, ours: Any, prompts: list[list[int]]) -> Found:
    free = {p: stock.ask("generate", **asked(p))["output_ids"] for p in (COUNT, LOOP, PROSE)}
    cases = requests(free)
    best = {"return_logprob": True, "top_logprobs_num": 2}
    theirs = {name: stock.ask("generate", **{**best, **case}) for name, case in cases.items()}
    alone = {name: ours.ask("generate", **case) for name, case in cases.items()}
    # A score of a text is asked for like this; with overlap scheduling it is in a decode step, too.
    score = asked(PROSE, {"return_logprob": True, "logprob_start_len": 0}, max_new_tokens=1)
    params = {"max_new_tokens": OTHERS_LENGTH, "temperature": 0.0, "ignore_eos": True}
    told = ours.ask("beside", prompts=prompts, params=params, asked=[score, *cases.values(), score])
    answers = told["answers"]
    stock_others = stock.answers(prompts, OTHERS_LENGTH, **best)
    sampled = {"sampling_seed": 7, "temperature": 1.0}
    return Found(
        free=free,
        stock=theirs,
        ours={"alone": alone, "beside": dict(zip(cases, answers[1:-1], strict=True))},
        others=told["others"],
        stock_others=stock_others,
        stock_gaps=gpu_exact.score(stock, prompts, stock_others),
        gaps=gpu_exact.score(stock, prompts, told["others"]),
        running=told["running"],
        counters=told["counters"],
        scored=[stock.ask("generate", **score), answers[0], answers[-1]],
        seed=ours.ask("refusal", **asked(PROSE, **sampled)),
    )


def same_until(found: Found, name: str, place: str) -> int:
    """Tokens up to which a text is stock's; it may leave it only where stock is undecided."""
    ours, theirs = found.ours[place][name], found.stock[name]
    a, b = ours["output_ids"], theirs["output_ids"]
    result = gpu_exact.compare_texts([ours], [theirs])
    top = theirs["meta_info"]["output_top_logprobs"]
    at = result["splits"][0].get("at", len(a)) if result["splits"] else len(a)
    shown = f"{name} {place}: {result}\nours   {a} {ours['text']!r}\nstock  {b} {theirs['text']!r}"
    assert result["worst_gap"] <= TAU, f"{shown}\nbest there: {top[at : at + 1]}"
    return int(at)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", NAMES)
def test_texts_are_those_of_stock(found, name, place):
    same_until(found, name, place)


def test_the_parameters_change_stocks_texts(found):
    """Or the comparison would prove nothing."""
    for prompt, names in {
        LOOP: ["frequency_penalty", "repetition_penalty", "logit_bias", "custom_logit_processor"],
        PROSE: ["presence_penalty", "regex", "ebnf"],
        COUNT: ["min_new_tokens"],
    }.items():
        for name in names:
            text = found.stock[name]["output_ids"]
            assert text != found.free[prompt][: len(text)], name
    assert len(found.stock["min_new_tokens"]["output_ids"]) > 14


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", STRUCTURED)
def test_structured_texts_obey(found, name, place):
    text = found.ours[place][name]["text"]
    if name != "structural_tag":
        # Behind a tag's end a text is free.
        assert found.ours[place][name]["meta_info"]["finish_reason"]["type"] == "stop", text
    if name == "regex":
        assert re.fullmatch(STRUCTURED[name]["regex"], text), text
    elif name == "ebnf":
        assert text in ("yes, it is late", "yes, I am tired")
    else:
        bodies = re.findall(r"\[person\](.*?)\[/person\]", text, re.DOTALL)
        bodies = bodies if name == "structural_tag" else [text]
        assert bodies, text
        for one in bodies:
            assert set(json.loads(one)) == {"name", "age"}, text


@pytest.mark.parametrize("place", PLACES)
def test_logprobs_are_those_of_stock(found, place):
    at = same_until(found, "return_logprob", place)
    ours = found.ours[place]["return_logprob"]["meta_info"]
    theirs = found.stock["return_logprob"]["meta_info"]
    apart: dict[str, list[float]] = {}
    for side in ("input", "output"):
        for kind in ("token", "top", "token_ids"):
            key = f"{side}_{kind}_logprobs"
            assert len(ours[key]) == (len(theirs[key]) if side == "input" else LENGTH), key
            until = None if side == "input" else at
            for a, b in list(zip(ours[key], theirs[key], strict=False))[:until]:
                if kind == "token":
                    a, b = [a], [b]
                known = {entry[1]: entry[0] for entry in b or [] if entry[0] is not None}
                pairs = [(e[0], known[e[1]]) for e in a or [] if e[1] in known]
                apart.setdefault(key, []).extend(abs(x - y) for x, y in pairs)
    worst = {key: (len(gaps), max(gaps), float(np.median(gaps))) for key, gaps in apart.items()}
    print(place, worst)
    for key, (count, most, median) in worst.items():
        assert count >= 8, (key, worst)
        assert most <= 2 * TAU, (key, worst)
        assert median <= 0.1, (key, worst)


@pytest.mark.parametrize("place", PLACES)
def test_hidden_states_are_those_of_stock(found, place):
    at = same_until(found, "return_hidden_states", place)
    ours, theirs = (
        answer["return_hidden_states"]["meta_info"]["hidden_states"]
        for answer in (found.ours[place], found.stock)
    )
    # The first entry holds the prompt's tokens that were not cached.
    assert len(ours) == len(theirs) == LENGTH
    apart = []
    for a, b in list(zip(ours, theirs, strict=True))[:at]:
        a, b = (np.atleast_2d(np.asarray(x, dtype=np.float64))[-1] for x in (a, b))
        apart.append(float(np.linalg.norm(a - b) / np.linalg.norm(b)))
    print(place, max(apart), np.median(apart))
    assert len(apart) >= 8
    assert np.median(apart) <= 0.05, apart
    assert max(apart) <= 0.2, apart


def test_one_token_with_its_logprobs_beside_others(found):
    stock, *ours = [answer["meta_info"] for answer in found.scored]
    for meta in ours:
        assert len(meta["output_token_logprobs"]) == 1
        a, b = (m["input_token_logprobs"] for m in (meta, stock))
        assert [x[1] for x in a] == [x[1] for x in b]
        gaps = [abs(x[0] - y[0]) for x, y in zip(a[1:], b[1:], strict=True)]
        assert max(gaps) <= 2 * TAU, gaps


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", NAMES)
def test_answers_say_why(found, name, place):
    told = found.ours[place][name]["meta_info"]["aspire"]
    assert (told["speculation"], told["speculated"]) == ("off by parameter", False), told
    assert name in told["reason"]


def test_the_others_ran_meanwhile_and_speculate_again(found):
    assert set(found.running) == {OTHERS}, "too short: some had ended before the last request came"
    left, end = found.counters
    answers = [answer for place in PLACES for answer in found.ours[place].values()]
    plain = sum(len(answer["output_ids"]) - 1 for answer in answers)
    assert left["plain_steps_for_parameters"] >= plain, (left, plain)
    # The last one may have been in a step that was running.
    assert end["plain_steps_for_parameters"] - left["plain_steps_for_parameters"] <= 2
    assert end["accepted_drafts"] > left["accepted_drafts"] + 20, (left, end)
    for answer in found.others:
        told = answer["meta_info"]["aspire"]
        assert (told["speculation"], told["reason"], told["speculated"]) == ("on", None, True)


def test_the_others_keep_their_texts(found):
    result = gpu_exact.compare_texts(found.others, found.stock_others)
    assert result["worst_gap"] <= TAU, result
    allowed = max(gpu_exact.allowed_gap(found.stock_gaps), TAU)
    assert max(found.gaps) <= allowed, (found.gaps, found.stock_gaps)


def test_a_seed_is_refused_as_stock_would_not_honour_it(found):
    assert "sampling_seed" in found.seed
    assert "deterministic" in found.seed
