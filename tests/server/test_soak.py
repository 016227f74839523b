"""Two thousand requests on one server: nothing lost, doubled or leaked, and no step gets slower.

What a greedy request must answer comes from the same server, alone and with its speculation
switched off.
"""

from __future__ import annotations

import json
import os
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from aspire_sglang.cli.server import plain_args
from tests.server.client import Client, request
from tests.server.conftest import COMMON, DRAFTING, Aspire, serving
from tests.server.prompts import LOOP, PROSE, SHORT

REQUESTS = int(os.environ.get("ASPIRE_SOAK_REQUESTS", "2000"))
ROUNDS = 8
CONCURRENT = 24
# Growth of the scheduler's memory after the first two rounds. By then the statistics of the last
# 256 requests, the caches of grammars and the arenas of malloc are as full as they get; what a
# request holds afterwards would show: 1 kB that each of 1,500 requests keeps is 1.5 MB. The bound
# leaves room for malloc's fragments, which come in pieces of a step's logits (26 rows x 49,152 x 4
# bytes are 5 MB).
RSS_GROWTH = 48 * 2**20

# CPU time of a step in the last round against the second, the same eight requests in each.
STEP_GROWTH = 1.25


@pytest.fixture(scope="module", params=["tiny", "smollm2"])
def server(
    request: pytest.FixtureRequest, model: Path, tiny_model: Path, logs: Path, tokenizer: Any
) -> Iterator[Aspire]:
    path = {"tiny": tiny_model, "smollm2": model}[request.param]
    args = plain_args(
        path,
        context_length=2048,
        # Small enough that requests are retracted now and then.
        max_total_tokens=1200,
        max_running_requests=CONCURRENT,
        extra=COMMON,
    )
    with serving(args, f"soak-{request.param}", logs, tokenizer) as client:
        yield client


class Pool:
    """Greedy requests that are sent again and again, and what they must answer."""

    def __init__(self, client: Client, size: int, rng: random.Random) -> None:
        text = client.ids(" ".join(SHORT) + LOOP)
        self.bodies, self.answers = [], []
        for i in range(size):
            start = rng.randint(0, len(text) - 61)
            prompt = text[start : start + rng.randint(1, 60)]
            self.bodies.append(request(prompt, max_new_tokens=1 + 3 * (i % 6), ignore_eos=True))
        off = {"custom_params": {"aspire": False}}
        for body in self.bodies:
            plainly = client.post({**body, "sampling_params": {**body["sampling_params"], **off}})
            self.answers.append(plainly.json()["output_ids"])


class Soak:
    """Sends requests of all kinds and remembers what was wrong."""

    def __init__(self, client: Aspire) -> None:
        self.client = client
        self.rng = random.Random(2026)
        self.pool = Pool(client, 42, self.rng)
        self.text = client.ids((PROSE + LOOP) * 4)
        self.wrong: list[str] = []
        self.counts = {"greedy": 0, "streamed": 0, "sampled": 0, "aborted": 0, "left": 0}

    def one(self, i: int) -> None:
        if i % 5 < 2:
            self._greedy(i, streamed=bool(i % 2))
        else:
            self._sampled(i)

    def _greedy(self, i: int, streamed: bool) -> None:
        which = i % len(self.pool.bodies)
        body, expected = self.pool.bodies[which], self.pool.answers[which]
        found = self._stream(body) if streamed else self.client.post(body).json()["output_ids"]
        self.counts["streamed" if streamed else "greedy"] += 1
        if found != expected:
            self.wrong.append(f"request {i}: {found} instead of {expected}")

    def _stream(self, body: dict[str, Any], events: int | None = None) -> list[int]:
        ids: list[int] = []
        with self.client.http.stream("POST", "/generate", json=body | {"stream": True}) as reply:
            for line in reply.iter_lines():
                if not line.startswith("data: {"):
                    continue
                new = json.loads(line[6:])["output_ids"]
                if new[: len(ids)] != ids or len(new) <= len(ids):
                    self.wrong.append(f"a stream went from {ids} to {new}")
                ids = new
                events = None if events is None else events - 1
                if events == 0:
                    break
        return ids

    def _sampled(self, i: int) -> None:
        rng = random.Random(i)
        options: dict[str, Any] = {"temperature": 1.0, "ignore_eos": True}
        options["max_new_tokens"] = rng.randint(1, 14)
        kinds: tuple[dict[str, Any], ...] = (
            {},
            {"top_p": 0.95},
            {"sampling_seed": i},
            {"repetition_penalty": 1.2},
            {"return_logprob": True},
            {"regex": "[a-z]{3,9} [0-9]{2}"},
            {"custom_params": {"aspire": False}},
        )
        start = rng.randint(0, 40)
        prompt = self.text[start : start + rng.randint(1, 100)]
        # SGLang aborts every request whose id begins with the one named.
        rid = f"soak-{i:05d}"
        body = request(prompt, rid=rid, **options, **kinds[i % len(kinds)])
        if i % 10 == 2:
            self.counts["aborted"] += 1
            threading.Timer(
                rng.uniform(0.0, 0.5), self.client.post, ({"rid": rid}, "/abort_request")
            ).start()
        if i % 20 == 3:
            self.counts["left"] += 1
            self._stream(body, events=1)
            return
        self.counts["sampled"] += 1
        reply = self.client.post(body)
        if reply.status_code == 400 and "Aborted" in reply.text and i % 10 == 2:
            return
        if reply.status_code != 200:
            self.wrong.append(f"request {i}: {reply.status_code} {reply.text}")
            return
        meta = reply.json()["meta_info"]
        if len(reply.json()["output_ids"]) != meta["completion_tokens"]:
            self.wrong.append(f"request {i}: counts differ")
        if meta["completion_tokens"] > options["max_new_tokens"]:
            self.wrong.append(f"request {i}: too many tokens")


def scheduler_process(client: Client) -> psutil.Process:
    children = psutil.Process(client.server.pid).children(recursive=True)
    (found,) = (child for child in children if "scheduler" in " ".join(child.cmdline()))
    return found


def probe(client: Aspire, process: psutil.Process) -> float:
    """CPU milliseconds per decode step of the same eight requests, the least of three runs."""
    prompts = [client.ids(text) for text in SHORT[:8]]
    best = float("inf")
    for _ in range(3):
        steps, spent = client.aspire()["decode_steps"], sum(process.cpu_times()[:2])
        client.generate_all(prompts, max_new_tokens=24, ignore_eos=True)
        steps = client.aspire()["decode_steps"] - steps
        best = min(best, 1e3 * (sum(process.cpu_times()[:2]) - spent) / steps)
    return best


def used_tokens(client: Client) -> float:
    """KV slots in use after a flush; the gauge is written by the next batch."""
    client.flush()
    client.generate(SHORT[0], max_new_tokens=1)
    client.flush()
    client.generate(SHORT[0], max_new_tokens=1)
    return client.metric("sglang:num_used_tokens")


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_two_thousand_requests(server):
    client = server
    client.begin_test()
    client.configure(DRAFTING)
    process = scheduler_process(client)
    soak = Soak(client)
    rows = []
    idle = used_tokens(client)
    for number in range(ROUNDS):
        first, last = (REQUESTS * n // ROUNDS for n in (number, number + 1))
        start = time.monotonic()
        with ThreadPoolExecutor(CONCURRENT) as pool:
            list(pool.map(soak.one, range(first, last)))
        seconds = time.monotonic() - start
        client.wait_idle(60)
        row = {
            "requests": last,
            "seconds": round(seconds, 1),
            "used": used_tokens(client) - idle,
            "cpu_ms_per_step": round(probe(client, process), 2),
            "rss_mib": round(process.memory_info().rss / 2**20, 1),
        }
        rows.append(row)
        print(json.dumps(row), flush=True)
        client.assert_invariants()
        assert soak.wrong == [], soak.wrong[:5]
        assert row["used"] == 0
    total = client.aspire()
    retracted = "Retract requests" in client.server.log.read_text(errors="replace")
    print(json.dumps({**soak.counts, "draft_rows": total["draft_rows"], "retracted": retracted}))
    assert total["draft_rows"] > REQUESTS, "void: speculation hardly ran"
    assert retracted, "void: memory was never short"
    assert rows[-1]["rss_mib"] - rows[1]["rss_mib"] <= RSS_GROWTH / 2**20, rows
    assert rows[-1]["cpu_ms_per_step"] <= STEP_GROWTH * rows[1]["cpu_ms_per_step"], rows
