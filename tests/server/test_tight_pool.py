"""A KV pool far too small and prefill in small chunks: retraction and resumption (B21, B26).

What is expected comes from the same server: one request at a time, its speculation switched off.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from aspire_sglang.cli.server import plain_args
from tests.server.client import Client
from tests.server.conftest import CHECKS, COMMON, DRAFTING, FULL, Aspire, serving, speculated
from tests.server.prompts import COUNT, LOOP, SHORT
from tests.server.scoring import assert_greedy

POOL = 400
CHUNK = 64

# Besides the retractions that the pool forces, one every so many steps.
RETRACT = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "30"}


@pytest.fixture(scope="module")
def server(model: Path, logs: Path, tokenizer: Any) -> Iterator[Aspire]:
    args = plain_args(
        model,
        max_total_tokens=POOL,
        chunked_prefill_size=CHUNK,
        max_running_requests=16,
        extra=COMMON,
    )
    with serving(args, "tight", logs, tokenizer, env=CHECKS | RETRACT) as client:
        yield client


@pytest.fixture
def tight(server: Aspire) -> Iterator[Aspire]:
    with server.judged() as client:
        yield client


@pytest.fixture
def scorer(server: Aspire) -> Client:
    """The same server, for answers that the invariants do not speak of."""
    return Client(server.server, False, server.tokenizer)


OFF = {"custom_params": {"aspire": False}}


def retractions(client: Client) -> float:
    try:
        return client.metric("sglang:num_retracted_requests_total")
    except KeyError:
        return 0.0


def test_retracted_requests_end_with_the_same_text(tight):
    """B21: greedy and seeded requests, with log-probabilities, several times retracted each."""
    tight.configure(DRAFTING)
    before = retractions(tight)
    bodies = [{"temperature": 1.0, "sampling_seed": i} if i % 2 else {} for i in range(8)]

    def one(i: int, **more: Any) -> dict[str, Any]:
        options = {"max_new_tokens": 48, "ignore_eos": True, "return_logprob": i % 3 == 0}
        return tight.generate(SHORT[i], **options, **bodies[i], **more)

    expected = [one(i, **OFF) for i in range(8)]
    assert not any(a["meta_info"]["aspire"]["speculated"] for a in expected)
    assert retractions(tight) == before, "alone, nothing is retracted"
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(one, range(8)))
    speculated(found)
    assert retractions(tight) > before + 3, "void: nothing was retracted"
    log = tight.server.log.read_text(errors="replace")
    assert "KV cache pool is full. Retract requests" in log
    assert "Testing retraction" in log
    for i, (a, b) in enumerate(zip(expected, found, strict=True)):
        assert b["meta_info"]["finish_reason"]["type"] == "length"
        assert b["output_ids"] == a["output_ids"], f"request {i}"
        if i % 3 == 0:
            own, theirs = (x["meta_info"]["output_token_logprobs"] for x in (b, a))
            assert [entry[1] for entry in own] == b["output_ids"]
            assert [e[0] for e in own] == pytest.approx([e[0] for e in theirs], abs=1e-3)


def test_request_that_alone_exceeds_the_pool(tight):
    """B21: it ends, as long as it got or aborted, and the server lives."""
    tight.configure(DRAFTING)
    answer = tight.post(
        {"text": LOOP, "sampling_params": {"max_new_tokens": 4000, "ignore_eos": True}}
    )
    if answer.status_code == 200:
        reason = answer.json()["meta_info"]["finish_reason"]["type"]
        assert reason in ("length", "abort")
        speculated(answer.json())
    else:
        assert "memory" in answer.text or "length" in answer.text
    speculated(tight.generate(COUNT, max_new_tokens=24, ignore_eos=True))


@pytest.mark.parametrize("length", [CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 7])
def test_chunked_prefill(tight, scorer, length):
    """B26: cold and warm, while another request decodes; the budget covers the context."""
    tight.configure(DRAFTING, FULL)
    tight.flush()
    prompt = tight.ids(" ".join(SHORT))[:length]
    options = {"max_new_tokens": 16, "ignore_eos": True}
    with ThreadPoolExecutor(1) as pool:
        neighbour = pool.submit(tight.generate, COUNT, max_new_tokens=40, ignore_eos=True)
        cold = tight.generate(prompt, **options)
        warm = tight.generate(prompt, **options)
        beside = neighbour.result()
    speculated([cold, warm])
    assert cold["meta_info"]["cached_tokens"] == 0
    assert warm["meta_info"]["cached_tokens"] > 0
    assert cold["output_ids"] == warm["output_ids"]
    assert_greedy(scorer, prompt, cold["output_ids"])
    assert_greedy(scorer, tight.ids(COUNT), beside["output_ids"])
