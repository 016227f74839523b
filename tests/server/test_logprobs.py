"""Log-probabilities and hidden states of accepted tokens (B18)."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from tests.server.client import Client
from tests.server.conftest import DRAFTING, FULL, TINY, speculated
from tests.server.prompts import COUNT, LOOP, PROSE

TOLERANCE = 1e-3
"""Between decode and prefill in float32, in nats."""

LENGTH = {"max_new_tokens": 24, "ignore_eos": True}


def rescored(plain: Client, prompt: list[int], output: list[int], **options: Any) -> dict:
    """The same tokens read by plain decoding's prefill, at temperature 1."""
    return plain.generate(
        prompt + output,
        max_new_tokens=0,
        return_logprob=True,
        logprob_start_len=len(prompt) - 1,
        **options,
    )["meta_info"]


def assert_agrees(plain: Client, prompt: str, answer: dict, best: int, listed: list[int]) -> None:
    ids, meta = answer["output_ids"], answer["meta_info"]
    n = meta["completion_tokens"]
    own = meta["output_token_logprobs"]
    assert [token for _, token, *_ in own] == ids
    assert len(own) == len(ids) == n
    again = rescored(plain, plain.ids(prompt), ids, top_logprobs_num=best, token_ids_logprob=listed)
    theirs = again["input_token_logprobs"][-n:]
    assert np.abs([a[0] - b[0] for a, b in zip(own, theirs, strict=True)]).max() <= TOLERANCE
    for name, expected in (("top", best), ("token_ids", len(listed))):
        found = meta[f"output_{name}_logprobs"]
        read = again[f"input_{name}_logprobs"][-n:]
        assert [len(entries) for entries in found] == [expected] * n
        for a, b in zip(found, read, strict=True):
            assert np.abs([x[0] - y[0] for x, y in zip(a, b, strict=True)]).max() <= TOLERANCE
            if name == "token_ids":
                assert [x[1] for x in a] == listed
    assert all(
        top[0][0] >= entry[0] for top, entry in zip(meta["output_top_logprobs"], own, strict=True)
    )


@pytest.mark.parametrize("context", [FULL, TINY], ids=["full", "tiny"])
def test_decode_equals_rescore_in_a_mixed_batch(plain, aspire, context):
    """Ragged lists, greedy and sampled requests, and one that asks for nothing."""
    aspire.configure(DRAFTING, context)
    asks = [
        (PROSE, 5, [1, 2, 10], {}),
        (COUNT, 3, [4], {"temperature": 1.0}),
        (LOOP, 1, [7, 8], {"temperature": 1.0, "top_p": 0.9, "sampling_seed": 3}),
        (PROSE, 2, [9, 11, 12, 13], {"temperature": 1.0, "top_k": 20}),
    ]
    with ThreadPoolExecutor(len(asks) + 1) as pool:
        silent = pool.submit(aspire.generate, COUNT, **LENGTH)
        jobs = [
            pool.submit(
                aspire.generate,
                prompt,
                return_logprob=True,
                top_logprobs_num=best,
                token_ids_logprob=listed,
                **LENGTH,
                **sampling,
            )
            for prompt, best, listed, sampling in asks
        ]
        answers = [job.result() for job in jobs]
    speculated(answers)
    assert "output_token_logprobs" not in silent.result()["meta_info"]
    for (prompt, best, listed, sampling), answer in zip(asks, answers, strict=True):
        assert answer["meta_info"]["aspire"]["speculated"]
        assert_agrees(plain, prompt, answer, best, listed)
        if not sampling:
            top = answer["meta_info"]["output_top_logprobs"]
            assert [entries[0][1] for entries in top] == answer["output_ids"]


def test_temperature_scales_as_in_plain_decoding(plain, aspire):
    """A seed makes both servers emit the same tokens, so that their values can be compared."""
    aspire.configure(DRAFTING)
    options = {
        "return_logprob": True,
        "top_logprobs_num": 4,
        "token_ids_logprob": [5, 6],
        "logprob_start_len": 2,
        "temperature": 0.6,
        "top_p": 0.9,
        "sampling_seed": 21,
        **LENGTH,
    }
    expected, found = plain.generate(PROSE, **options), aspire.generate(PROSE, **options)
    speculated(found)
    assert found["output_ids"] == expected["output_ids"]
    for side in ("input", "output"):
        for name in ("token", "top", "token_ids"):
            ours = found["meta_info"][f"{side}_{name}_logprobs"]
            theirs = expected["meta_info"][f"{side}_{name}_logprobs"]
            assert values(ours) == pytest.approx(values(theirs), abs=TOLERANCE), (side, name)


def values(nested: Any) -> list[float]:
    """Every log-probability of a field of meta_info, None left out."""
    if nested is None:
        return []
    if nested and not isinstance(nested[0], list):
        return [] if nested[0] is None else [nested[0]]
    return [value for entry in nested for value in values(entry)]


def test_nothing_follows_a_stop(aspire):
    """I2: an accepted run that holds a stop brings no log-probabilities from behind it."""
    aspire.configure(DRAFTING, FULL)
    ids = aspire.generate(COUNT, **LENGTH)["output_ids"]
    stop = next(i for i in range(6, 24) if ids[i] not in ids[:i])
    answer = aspire.generate(
        COUNT,
        max_new_tokens=24,
        stop_token_ids=[ids[stop]],
        return_logprob=True,
        top_logprobs_num=2,
    )
    speculated(answer)
    meta = answer["meta_info"]
    assert meta["finish_reason"]["type"] == "stop"
    assert answer["output_ids"] == ids[: stop + 1]
    assert [token for _, token, *_ in meta["output_token_logprobs"]] == answer["output_ids"]
    assert len(meta["output_top_logprobs"]) == stop + 1


def test_openai_logprobs(plain, aspire):
    aspire.configure(DRAFTING)
    before = aspire.aspire()["draft_rows"]
    body = {"model": "m", "temperature": 0, "max_tokens": 16}
    completion = body | {"prompt": COUNT, "logprobs": 3}
    chat = body | {
        "messages": [{"role": "user", "content": "Count to ten."}],
        "logprobs": True,
        "top_logprobs": 2,
    }
    for path, request in (("/v1/completions", completion), ("/v1/chat/completions", chat)):
        expected, found = (c.post(request, path).json()["choices"][0] for c in (plain, aspire))
        for choice in (expected, found):
            choice["logprobs"] = flat(choice["logprobs"])
        assert len(found["logprobs"]) == 16
        assert [token for token, _ in found["logprobs"]] == [t for t, _ in expected["logprobs"]]
        assert [v for _, v in found["logprobs"]] == pytest.approx(
            [v for _, v in expected["logprobs"]], abs=TOLERANCE
        )
    assert aspire.aspire()["draft_rows"] > before, "void: speculation did not run"


def flat(logprobs: dict) -> list[tuple[str, float]]:
    if logprobs.get("content"):
        return [(entry["token"], entry["logprob"]) for entry in logprobs["content"]]
    return list(zip(logprobs["tokens"], logprobs["token_logprobs"], strict=True))


@pytest.mark.parametrize("mode", [True, "last"])
def test_hidden_states_equal_plain_decodings(plain, aspire, mode):
    aspire.configure(DRAFTING, FULL)
    options = {"return_hidden_states": mode, **LENGTH}
    expected = plain.generate(COUNT, **options)
    found = aspire.generate_all([COUNT, COUNT], **options)
    speculated(found)
    theirs = expected["meta_info"]["hidden_states"]
    for answer in found:
        assert answer["output_ids"] == expected["output_ids"]
        ours = answer["meta_info"]["hidden_states"]
        if mode == "last":
            np.testing.assert_allclose(ours, theirs, atol=1e-2, rtol=1e-3)
            continue
        # The first entry holds the states of the prompt's tokens that were not cached.
        assert len(ours) == len(theirs) == len(answer["output_ids"])
        for a, b in zip(ours, theirs, strict=True):
            a, b = np.atleast_2d(a)[-1], np.atleast_2d(b)[-1]
            np.testing.assert_allclose(a, b, atol=1e-2, rtol=1e-3)
