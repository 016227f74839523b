"""Server flags beside ASPIRE that change no text; what they are compared to comes from the same
server, one request at a time, its speculation switched off."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from aspire_sglang.cli.server import plain_args
from tests.server.client import request
from tests.server.conftest import (
    COMMON,
    DRAFTING,
    FULL,
    TINY,
    Aspire,
    serving,
    speculated,
)
from tests.server.prompts import COUNT, PROSE, SHORT
from tests.server.scoring import gaps
from tests.server.test_lifecycle import wait_for_steps

OFF = {"custom_params": {"aspire": False}}
MOST_RUNNING = 4
INTERVAL = 3

MANY = (
    # SGLang sets memory aside for the largest prefill, which now has no limit of its own.
    "--mem-fraction-static=0.5",
    "--disable-radix-cache",
    "--scheduler-recv-interval=3",
    "--enable-tokenizer-batch-encode",
    f"--stream-interval={INTERVAL}",
    "--incremental-streaming-output",
    "--grammar-backend=llguidance",
    "--enable-priority-scheduling",
    "--priority-scheduling-preemption-threshold=0",
    "--retraction-policy=priority",
    "--default-priority-value=0",
)


@pytest.fixture(scope="module")
def many_flags(tiny_model: Path, logs: Path, tokenizer: Any) -> Iterator[Aspire]:
    args = plain_args(
        tiny_model,
        max_total_tokens=8000,
        chunked_prefill_size=-1,
        max_running_requests=MOST_RUNNING,
        extra=(*COMMON, *MANY),
    )
    with serving(args, "many-flags", logs, tokenizer) as client:
        yield client


@pytest.fixture
def flagged(many_flags: Aspire) -> Iterator[Aspire]:
    with many_flags.judged() as client:
        client.configure(DRAFTING, FULL)
        yield client


def streamed_ids(client: Aspire, body: dict[str, Any]) -> list[list[int]]:
    """The new ids of every event of a stream."""
    found = []
    with client.http.stream("POST", "/generate", json=body | {"stream": True}) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                found.append(json.loads(line[6:])["output_ids"])
    return found


@pytest.mark.parametrize("context", [FULL, TINY], ids=["full", "tiny"])
def test_many_flags_change_no_text(flagged, context):
    flagged.configure(DRAFTING, context)
    options = {"max_new_tokens": 32, "ignore_eos": True}
    prompts = SHORT[:6]
    expected = [flagged.generate(p, **options, **OFF)["output_ids"] for p in prompts]
    assert min(len(set(ids)) for ids in expected) > 25, "void: the texts repeat themselves"
    # One call with several texts: they are tokenized in one batch.
    body = {"text": prompts, "sampling_params": {"temperature": 0, **options}}
    found = flagged.post(body).json()
    speculated(found)
    assert [a["output_ids"] for a in found] == expected
    assert all(a["meta_info"]["cached_tokens"] == 0 for a in found)
    chunks = streamed_ids(flagged, request(prompts[0], **options))
    assert [token for chunk in chunks for token in chunk] == expected[0]
    assert min(map(len, chunks[1:-1])) >= INTERVAL
    phone = flagged.generate(PROSE, max_new_tokens=20, regex="[0-9]{3}-[0-9]{4}")
    assert re.fullmatch("[0-9]{3}-[0-9]{4}", phone["text"])


def test_preempted_requests_end_with_the_same_text(flagged):
    """A request of higher priority takes the place of a running one, which resumes later."""
    options = {"max_new_tokens": 150, "ignore_eos": True}
    low = SHORT[:MOST_RUNNING]
    expected = [flagged.generate(p, **options, **OFF)["output_ids"] for p in low]
    first = flagged.generate(COUNT, max_new_tokens=8, ignore_eos=True, **OFF)["output_ids"]
    with ThreadPoolExecutor(MOST_RUNNING) as pool:
        jobs = [pool.submit(flagged.post, request(p, **options) | {"priority": 1}) for p in low]
        wait_for_steps(flagged, 10)
        urgent = request(COUNT, max_new_tokens=8, ignore_eos=True) | {"priority": 9}
        found = flagged.post(urgent).json()
        waiting = [not job.done() for job in jobs]
        answers = [job.result().json() for job in jobs]
    # All places were taken, so it can only have been served by preemption.
    assert all(waiting), "void: a place was free"
    assert found["output_ids"] == first
    speculated(answers)
    assert [a["output_ids"] for a in answers] == expected


@pytest.fixture(scope="module")
def two_replicas(model: Path, logs: Path, tokenizer: Any) -> Iterator[Aspire]:
    args = plain_args(
        model,
        dtype="bfloat16",
        context_length=2048,
        max_total_tokens=4000,
        extra=(
            *COMMON,
            "--dp-size=2",
            "--load-balance-method=round_robin",
            "--schedule-policy=lpm",
            "--radix-eviction-policy=lfu",
            "--grammar-backend=outlines",
        ),
    )
    with serving(args, "two-replicas", logs, tokenizer) as client:
        yield client


@pytest.mark.slow
def test_two_replicas(two_replicas):
    """In bfloat16, whose rounding differs between shapes: each token is the best one, or as near
    to it as plain decoding's own tokens are."""
    client = two_replicas
    client.begin_test()
    client.config_file.write_text("scheduler: {policy: staggered, gamma: 5}\n")
    body = {"server_args": {"aspire_reload_config": 1}}
    assert client.post(body, "/set_internal_state").json() == [True, True]
    options = {"max_new_tokens": 32, "ignore_eos": True}
    prompts = SHORT[:16]
    plainly = [client.generate(p, **options, **OFF) for p in prompts[:8]]
    found = client.generate_all(prompts, **options)
    speculated(found)
    states = client.http.get("/server_info").json()["internal_states"]
    assert [state["aspire"]["draft_rows"] > 0 for state in states] == [True, True]

    def worst(answers: list[dict[str, Any]]) -> float:
        pairs = zip(prompts, answers, strict=False)
        return max(max(gaps(client, client.ids(p), a["output_ids"])) for p, a in pairs)

    # Twice a rounding step of bfloat16 where plain decoding shows none by chance.
    assert worst(found) <= max(2 * worst(plainly), 0.25)
    phone = client.generate(PROSE, max_new_tokens=20, regex="[0-9]{3}-[0-9]{4}")
    assert re.fullmatch("[0-9]{3}-[0-9]{4}", phone["text"])
    assert not phone["meta_info"]["aspire"]["speculated"]
    client.answers.clear()
