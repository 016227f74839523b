"""Penalties, bias and custom processors act at every position of a run (B06, B07)."""

from __future__ import annotations

import json
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

from tests.server.client import request
from tests.server.conftest import DRAFTING, FULL, TINY, speculated
from tests.server.prompts import COUNT, LOOP, PROSE
from tests.server.test_sampling import p_value, target
from tests.server.test_stopping import ACCEPTING, first_at


def forbid_repeats() -> str:
    """A processor that forbids tokens among the last few, and so depends on the position."""

    # Defined here, it travels to the server by value: the server cannot import the tests.
    class ForbidRepeats(CustomLogitProcessor):
        def __call__(self, logits, custom_param_list=None):
            for row, params in enumerate(custom_param_list):
                for token in params["__req__"].output_ids[-params["window"] :]:
                    logits[row, token] = -float("inf")
            return logits

    return ForbidRepeats.to_str()


# Rejections cost a whole run each, so runs are short.
CONTEXTS = {
    "accepting": (DRAFTING, FULL),
    "rejecting": (DRAFTING, TINY, {"scheduler": {"policy": "staggered", "gamma": 2}}),
}


def batch(client, requests: list[dict]) -> list[dict]:
    """All requests at once, in the order given."""
    with ThreadPoolExecutor(len(requests)) as pool:
        return list(pool.map(lambda one: client.generate(**one), requests))


def ids(answers: list[dict]) -> list[list[int]]:
    return [answer["output_ids"] for answer in answers]


@pytest.mark.parametrize("context", CONTEXTS)
def test_penalised_texts_are_plain_decodings_in_one_batch_with_others(plain, aspire, context):
    """B06: every kind of penalty beside plain requests, each as if it were alone."""
    common = {"max_new_tokens": 28, "ignore_eos": True}
    free = {prompt: plain.generate(prompt, **common)["output_ids"] for prompt in (LOOP, PROSE)}
    banned, rare = str(free[LOOP][3]), "2000"
    changed = [
        {"prompt": LOOP, "frequency_penalty": 2.0},
        {"prompt": PROSE, "presence_penalty": 2.0},
        {"prompt": LOOP, "repetition_penalty": 1.3},
        {"prompt": LOOP, "logit_bias": {banned: -100}},
        {"prompt": LOOP, "logit_bias": {rare: 100}},
        # Without overlap scheduling SGLang combines repetition with the others in no fixed order.
        {"prompt": LOOP, "frequency_penalty": 0.3, "presence_penalty": 0.5},
        {
            "prompt": LOOP,
            "custom_logit_processor": forbid_repeats(),
            "custom_params": {"window": 4},
        },
    ]
    requests = [{"prompt": prompt} for prompt in free] + changed
    requests = [one | common for one in requests]
    expected = ids(batch(plain, requests))
    aspire.configure(*CONTEXTS[context])
    found = batch(aspire, requests)
    for answer in found:
        speculated(answer)
    assert ids(found) == expected
    texts = ids(found)[len(free) :]
    for change, text in zip(changed, texts, strict=True):
        assert text != free[change["prompt"]], "a penalty without effect proves nothing"
    assert int(banned) not in texts[3]
    assert set(texts[4]) == {int(rare)}
    assert all(len(set(texts[6][i : i + 5])) == 5 for i in range(len(texts[6]) - 4))
    if context == "accepting":
        # Drafts come from the penalised distribution: with full contexts nearly all are accepted.
        rates = [answer["meta_info"]["spec_accept_rate"] for answer in found]
        assert min(rates) > 0.9, rates


@pytest.mark.parametrize("shortest", [12, 30])
def test_min_new_tokens_counts_tokens(plain, aspire, shortest):
    """B07: a stop token is allowed from the same token on as in plain decoding."""
    aspire.configure(*ACCEPTING)
    text, at = first_at(plain, 20)
    options = {"stop_token_ids": [text[at]], "min_new_tokens": shortest, "max_new_tokens": 48}
    expected, found = plain.generate(COUNT, **options), aspire.generate(COUNT, **options)
    speculated(found)
    assert found["output_ids"] == expected["output_ids"]
    assert found["meta_info"]["finish_reason"] == expected["meta_info"]["finish_reason"]
    if shortest < at:
        assert len(found["output_ids"]) == at + 1
    else:
        assert len(found["output_ids"]) > shortest


def test_min_new_tokens_and_the_end_of_the_text(plain, aspire):
    """B07: the same for the model's own end of text, through the OpenAI endpoint."""
    aspire.configure(*ACCEPTING)
    body = {
        "messages": [{"role": "user", "content": "Say hello in one short sentence."}],
        "model": "m",
        "max_tokens": 60,
        "temperature": 0,
    }
    free = plain.post(body, "/v1/chat/completions").json()["usage"]["completion_tokens"]
    body["min_tokens"] = free + 9
    expected = plain.post(body, "/v1/chat/completions").json()
    found = aspire.post(body, "/v1/chat/completions").json()
    assert found["choices"][0]["message"] == expected["choices"][0]["message"]
    assert found["usage"]["completion_tokens"] == expected["usage"]["completion_tokens"]
    assert found["usage"]["completion_tokens"] >= free + 9


def retracted(client, prompt: str, at: tuple[int, ...], **options) -> dict:
    """A request that loses its KV and is prefilled again each time it has so many tokens."""
    body = request(prompt, stream=True, **options)
    waiting = list(at)
    with client.http.stream("POST", "/generate", json=body) as reply:
        for line in reply.iter_lines():
            if not line.startswith("data: {"):
                continue
            answer = json.loads(line[6:])
            if waiting and answer["meta_info"]["completion_tokens"] >= waiting[0]:
                waiting.pop(0)
                client.post({"mode": "retract"}, "/pause_generation")
                client.post({"torch_empty_cache": False}, "/continue_generation")
    assert answer["meta_info"]["num_retractions"] > 0, "void: nothing was retracted"
    return answer


def test_retraction_forgets_no_penalty(plain, aspire):
    """B06, B21: the counts of a retracted request go on where they were."""
    options = {"max_new_tokens": 48, "ignore_eos": True, "frequency_penalty": 1.0}
    options |= {"min_new_tokens": 40, "presence_penalty": -0.5}
    expected = plain.generate(PROSE, **options)
    aspire.configure(DRAFTING)
    found = retracted(aspire, PROSE, at=(6, 20), **options)
    speculated(found)
    assert found["output_ids"] == expected["output_ids"]


def test_sampled_tokens_follow_the_penalised_distribution(plain, aspire):
    """B04, B06: the third token, drawn in verified runs, given the two before it."""
    sampling = {"temperature": 1.0, "frequency_penalty": 2.0}
    prompt = aspire.ids("yes no yes no no yes yes no yes")
    aspire.configure(DRAFTING, {"scheduler": {"policy": "fixed", "gamma": 2}}, TINY)
    body = {"n": 200, "max_new_tokens": 4, "ignore_eos": True, **sampling}
    runs: list[list[int]] = []
    for _ in range(6):
        answers = aspire.generate(prompt, **body)
        speculated(answers)
        runs += ids(answers)
    prefix: list[int] = []
    for _ in range(2):
        prefix.append(Counter(run[len(prefix)] for run in runs).most_common(1)[0][0])
        runs = [run for run in runs if run[: len(prefix)] == prefix]
    p = target(plain, prompt + prefix, {"temperature": 1.0})
    weights = {token: q * 2.718281828 ** (-2.0 * prefix.count(token)) for token, q in p.items()}
    # What lies outside the list was not penalised.
    total = sum(weights.values()) + 1 - sum(p.values())
    penalised = {token: w / total for token, w in weights.items()}
    counts = Counter(run[2] for run in runs)
    assert p_value(counts, penalised) > 0.001
    assert p_value(counts, p) < 1e-6, "the penalty must be large enough to be seen"


def test_waiting_requests_join_penalised_ones(plain, aspire):
    """Batches that grow and shrink: penalties stay with their requests."""
    aspire.configure(DRAFTING)
    requests = [
        {"prompt": PROSE, "max_new_tokens": new, "ignore_eos": True, "presence_penalty": penalty}
        for new, penalty in [(30, 1.5), (8, 0.0), (16, 0.7), (24, 0.0), (12, -1.0)]
    ]
    expected = ids([plain.generate(**one) for one in requests])

    def late(place: int) -> dict:
        time.sleep(0.25 * place)
        return aspire.generate(**requests[place])

    with ThreadPoolExecutor(len(requests)) as pool:
        found = list(pool.map(late, range(len(requests))))
    speculated(found)
    assert ids(found) == expected
