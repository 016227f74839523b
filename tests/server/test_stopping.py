"""Stop conditions, limits and counts inside accepted runs (B10-B14)."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.server import tiny_model
from tests.server.conftest import DRAFTING, FULL, speculated
from tests.server.prompts import COUNT, PROSE
from tests.server.scoring import TAU

ACCEPTING = (DRAFTING, FULL, {"scheduler": {"policy": "staggered", "gamma": 8}})


def first_at(plain, index: int) -> tuple[list[int], int]:
    """Ids plain decoding produces after COUNT, and one at or after ``index`` not seen before."""
    ids = plain.generate(COUNT, max_new_tokens=64, ignore_eos=True)["output_ids"]
    at = next(j for j in range(index, len(ids)) if ids[j] not in ids[:j])
    return ids, at


@pytest.mark.parametrize("cap", [4, 5, 6, 7, 8, 9, 14])
def test_stop_token_against_length_cap(plain, aspire, cap):
    """B11: whichever comes first wins, and nothing follows it."""
    aspire.configure(*ACCEPTING)
    ids, at = first_at(plain, 5)
    options = {"stop_token_ids": [ids[at]], "max_new_tokens": cap}
    expected, found = plain.generate(COUNT, **options), aspire.generate(COUNT, **options)
    assert found["output_ids"] == expected["output_ids"]
    assert found["text"] == expected["text"]
    assert found["meta_info"]["finish_reason"] == expected["meta_info"]["finish_reason"]
    assert len(found["output_ids"]) == min(cap, at + 1)


@pytest.mark.parametrize("index", [3, 10, 17, 26])
@pytest.mark.parametrize("trim", [False, True])
def test_stop_string(plain, aspire, index, trim):
    """B10: a stop string early in a long accepted block is found."""
    aspire.configure(*ACCEPTING)
    ids, at = first_at(plain, index)
    stop = plain.tokenizer.decode(ids[at : at + 2])
    options = {
        "stop": [stop, "never seen", "###", "qqq"],
        "max_new_tokens": 1000,
        "ignore_eos": True,
        "no_stop_trim": trim,
    }
    expected, found = plain.generate(COUNT, **options), aspire.generate(COUNT, **options)
    speculated(found)
    assert found["text"] == expected["text"]
    assert found["meta_info"]["finish_reason"] == expected["meta_info"]["finish_reason"]
    assert found["meta_info"]["finish_reason"]["type"] == "stop"


@pytest.mark.parametrize("places", [(14, 11), (26, 23, 25), (9, 8, 7)])
def test_several_stops_in_one_run(plain, aspire, places):
    """What comes first in the text wins, whatever the order of the request."""
    aspire.configure(*ACCEPTING)
    ids = plain.generate(COUNT, max_new_tokens=40, ignore_eos=True)["output_ids"]
    stops = [plain.tokenizer.decode(ids[at : at + 2]) for at in places]
    options = {"stop": stops, "max_new_tokens": 400, "ignore_eos": True}
    expected, found = plain.generate(COUNT, **options), aspire.generate(COUNT, **options)
    speculated(found)
    assert found["text"] == expected["text"]
    assert found["meta_info"]["finish_reason"] == expected["meta_info"]["finish_reason"]
    assert found["meta_info"]["completion_tokens"] == expected["meta_info"]["completion_tokens"]


def test_stop_regex(plain, aspire):
    aspire.configure(*ACCEPTING)
    options = {"stop_regex": r"1[4-9]", "max_new_tokens": 400, "ignore_eos": True}
    expected, found = plain.generate(COUNT, **options), aspire.generate(COUNT, **options)
    speculated(found)
    assert found["text"] == expected["text"]
    assert found["meta_info"]["finish_reason"] == expected["meta_info"]["finish_reason"]


@pytest.mark.parametrize("new", [0, 1, 2, 3, 6, 9])
def test_short_outputs_and_short_prompts(plain, aspire, new):
    """B12: prompts of one to six tokens beside a long one."""
    aspire.configure(DRAFTING)
    prompts = [aspire.ids(PROSE)[:n] for n in (1, 2, 3, 5, 6)] + [aspire.ids(PROSE * 30)]
    expected = plain.generate_all(prompts, max_new_tokens=new, ignore_eos=True)
    found = aspire.generate_all(prompts, max_new_tokens=new, ignore_eos=True)
    for a, b in zip(expected, found, strict=True):
        assert b["output_ids"] == a["output_ids"]
        assert b["meta_info"]["completion_tokens"] == a["meta_info"]["completion_tokens"]
    if new >= 3:
        speculated(found)


def test_eos_ends_the_text(plain, aspire):
    """B13: counts end where the text ends."""
    aspire.configure(*ACCEPTING)
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": "Say hello in one short sentence."}],
        "max_tokens": 200,
        "temperature": 0,
    }
    expected = plain.post(body, "/v1/chat/completions").json()
    found = aspire.post(body, "/v1/chat/completions").json()
    assert found["choices"][0]["finish_reason"] == "stop"
    assert found["choices"][0]["message"] == expected["choices"][0]["message"]
    assert found["usage"] == {**expected["usage"], **_cached(found)}
    assert found["usage"]["completion_tokens"] < 200


def _cached(reply: dict) -> dict:
    # The two servers have different caches; all other counts must agree.
    return {"prompt_tokens_details": reply["usage"].get("prompt_tokens_details")}


def test_edge_of_the_context_window(small, small_model):
    """B14: the last positions of the window, several requests at once, neighbours untouched; the
    judge is the model in PyTorch."""
    small.configure(*ACCEPTING)
    limit = tiny_model.CONTEXT
    rng = random.Random(4)
    base = [rng.randrange(3, tiny_model.VOCAB) for _ in range(limit)]
    # SGLang admits prompts of at most context length - 6 tokens.
    margins = (8, 40)
    asks = [(base[: limit - margin], margin) for margin in margins]
    asks += [(base[7:17], 24), (base[100:160], 24)]
    # The long ones share all but their ends: read them once.
    small.generate(base[: limit - max(margins)], max_new_tokens=1)

    def one(ask: tuple[list[int], int], **more: object) -> dict:
        return small.generate(ask[0], max_new_tokens=ask[1], ignore_eos=True, **more)

    alone = [one(ask, custom_params={"aspire": False}) for ask in asks]
    with ThreadPoolExecutor(len(asks)) as pool:
        found = list(pool.map(one, asks))
    model = tiny_model.load(small_model)
    for (ids, _), a, b in zip(asks, alone, found, strict=True):
        speculated(b)
        assert b["meta_info"]["finish_reason"] == a["meta_info"]["finish_reason"]
        assert b["output_ids"] == a["output_ids"]
        assert max(tiny_model.gaps(model, ids, b["output_ids"])) <= TAU
    # SGLang keeps the last two positions for itself.
    for (ids, _), answer in zip(asks[: len(margins)], found, strict=False):
        assert len(ids) + len(answer["output_ids"]) == limit - 2


@pytest.mark.slow
def test_edge_of_the_context_window_of_a_trained_model(plain, aspire):
    """B14: the same against a server with plain decoding, which reads 8,000 tokens as well."""
    aspire.configure(*ACCEPTING)
    limit = 8192
    base = aspire.ids(PROSE + " ") * 1100
    # SGLang admits prompts of at most context length - 6 tokens.
    margins = (8, 40)
    neighbours = [COUNT, PROSE]
    alone = plain.generate_all(neighbours, max_new_tokens=24)
    long = [base[: limit - margin] for margin in margins]

    def fill(client) -> list[dict]:
        """Every long prompt up to the last position of the window, neighbours beside them."""
        # They share all but their ends: read them once.
        client.generate(base[: limit - max(margins)], max_new_tokens=1)
        with ThreadPoolExecutor(4) as pool:
            jobs = [
                pool.submit(client.generate, ids, max_new_tokens=limit - len(ids), ignore_eos=True)
                for ids in long
            ]
            jobs += [pool.submit(client.generate, n, max_new_tokens=24) for n in neighbours]
            return [job.result() for job in jobs][: len(long)]

    expected, found = fill(plain), fill(aspire)
    speculated(found)
    short = aspire.generate_all(neighbours, max_new_tokens=24)
    assert [a["output_ids"] for a in short] == [a["output_ids"] for a in alone]
    for a, b in zip(expected, found, strict=True):
        assert b["meta_info"]["finish_reason"] == a["meta_info"]["finish_reason"]
        assert b["output_ids"] == a["output_ids"]


@pytest.mark.parametrize("length", [8191, 8192, 8193, 8209])
def test_prompt_too_long(plain, aspire, length):
    """B14: the same verdict as plain decoding, and the next request is fine."""
    ids = (aspire.ids(PROSE + " ") * 1100)[:length]
    body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 4}}
    expected, found = plain.post(body), aspire.post(body)
    assert found.status_code == expected.status_code
    if length >= 8192:
        assert found.status_code == 400
        assert "context length" in found.text
    assert aspire.generate(COUNT, max_new_tokens=4)["meta_info"]["completion_tokens"] == 4


@pytest.mark.parametrize("beyond", [-1, 0, 1, 20])
def test_prompt_too_long_for_the_window(plain, aspire, beyond):
    """B14: a clean 400 that names the limit."""
    prompt = (aspire.ids(PROSE + " ") * 1100)[: 8192 + beyond]
    body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 4, "temperature": 0}}
    expected, found = plain.post(body), aspire.post(body)
    assert found.status_code == expected.status_code == 400
    assert "8192" in found.text


def test_end_of_text_as_the_first_token(plain, aspire):
    """B12: the prefill ends the request, so nothing is left to draft."""
    aspire.configure(*ACCEPTING)
    options = {"max_new_tokens": 12, "logit_bias": {str(aspire.tokenizer.eos_token_id): 100.0}}
    expected, found = plain.generate(COUNT, **options), aspire.generate(COUNT, **options)
    assert found["output_ids"] == expected["output_ids"] == [aspire.tokenizer.eos_token_id]
    assert found["text"] == expected["text"]
    assert found["meta_info"]["finish_reason"] == expected["meta_info"]["finish_reason"]
    assert not found["meta_info"]["aspire"]["speculated"]
