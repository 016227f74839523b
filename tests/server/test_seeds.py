"""A seed gives one text: with and without speculation, alone and in a batch (F09)."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.server.client import Client, request
from tests.server.conftest import DRAFTING, FULL, TINY, speculated
from tests.server.prompts import COUNT, PROSE

CELLS = [
    {"sampling_seed": 7, "temperature": 1.0},
    {"sampling_seed": 7, "temperature": 0.7, "top_p": 0.9},
    {"sampling_seed": 2**62 + 5, "temperature": 1.0, "top_k": 20},
    {"sampling_seed": -3, "temperature": 1.2, "min_p": 0.1},
    {"sampling_seed": 0, "temperature": 0.8, "top_k": 50, "top_p": 0.8, "min_p": 0.05},
]
LENGTH = {"max_new_tokens": 24, "ignore_eos": True}


def together(client: Client, others: list[dict]) -> list[dict]:
    """All cells at once, beside other requests."""
    with ThreadPoolExecutor(len(CELLS) + len(others)) as pool:
        jobs = [pool.submit(client.generate, PROSE, **LENGTH, **cell) for cell in CELLS]
        jobs += [pool.submit(client.generate, COUNT, **LENGTH, **other) for other in others]
        return [job.result() for job in jobs][: len(CELLS)]


@pytest.fixture(scope="module")
def expected(servers) -> list[list[int]]:
    """Plain decoding, each request alone."""
    return [servers[0].generate(PROSE, **LENGTH, **cell)["output_ids"] for cell in CELLS]


def test_plain_decoding_honours_seeds(plain, expected):
    again = together(plain, [{"temperature": 1.0}, {}])
    assert [a["output_ids"] for a in again] == expected
    assert len({tuple(ids) for ids in expected}) == len(CELLS)


@pytest.mark.parametrize("context", [{}, TINY], ids=["normal", "tiny"])
def test_batch_of_seeds_equals_plain_decoding(aspire, expected, context):
    aspire.configure(DRAFTING, context)
    found = together(aspire, [{"temperature": 1.0}, {}])
    speculated(found)
    assert [a["output_ids"] for a in found] == expected


def test_alone_equals_plain_decoding(aspire, expected):
    """Also when the request's own switch changes how it is made."""
    aspire.configure(DRAFTING, FULL)
    for cell, ids in zip(CELLS, expected, strict=True):
        found = aspire.generate(PROSE, **LENGTH, **cell)
        speculated(found)
        assert found["output_ids"] == ids
    # With the same noise and nearly the same distribution, drafts are nearly always right.
    assert found["meta_info"]["spec_accept_rate"] > 0.9
    off = aspire.generate(PROSE, **LENGTH, **CELLS[0], custom_params={"aspire": False})
    assert not off["meta_info"]["aspire"]["speculated"]
    assert off["output_ids"] == expected[0]


def test_seeds_differ_and_requests_without_vary(aspire):
    aspire.configure(DRAFTING)
    bodies = [{"sampling_seed": seed} for seed in range(6)] + [{}] * 6
    with ThreadPoolExecutor(len(bodies)) as pool:
        answers = list(
            pool.map(lambda b: aspire.generate(PROSE, temperature=1.0, **LENGTH, **b), bodies)
        )
    speculated(answers)
    assert len({tuple(answer["output_ids"]) for answer in answers}) == len(bodies)


def test_openai_seed(plain, aspire):
    aspire.configure(DRAFTING)
    body = {"model": "m", "prompt": PROSE, "max_tokens": 16, "ignore_eos": True}
    body |= {"temperature": 1.0, "seed": 11}
    before = aspire.aspire()["draft_rows"]
    texts = {
        client.post(body, "/v1/completions").json()["choices"][0]["text"]
        for client in (plain, aspire, aspire)
    }
    assert len(texts) == 1
    assert aspire.aspire()["draft_rows"] > before, "void: speculation did not run"


def test_copies_of_a_seeded_request_are_equal(aspire):
    """As SGLang's deterministic inference: the seed alone decides, not the copy's number."""
    aspire.configure(DRAFTING)
    answers = aspire.generate(PROSE, n=3, temperature=1.0, sampling_seed=5, **LENGTH)
    speculated(answers)
    assert len({a["text"] for a in answers}) == 1


def test_bad_seed_is_a_400(aspire):
    reply = aspire.post(request(PROSE, sampling_seed=2**64, temperature=1.0))
    assert reply.status_code == 400
    assert "sampling_seed" in reply.text
