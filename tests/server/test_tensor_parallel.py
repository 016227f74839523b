"""``--tp-size 2`` on a CPU: the same texts, the same decisions on both ranks, and a clean end.

Every server here runs with ``ASPIRE_CHECK_RANKS=1``: a step about which the ranks disagree ends it.
Two ranks take long to start where cores are few, so the short form of these tests is
``tests/unit/test_ranks.py``, two processes without a server.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from aspire_sglang.cli.process_tree import session_members
from aspire_sglang.cli.server import Server, aspire_args, plain_args
from tests.server import tiny_model
from tests.server.client import request
from tests.server.conftest import CHECKS, DRAFTING, START_SECONDS, Aspire, speculated
from tests.server.scoring import TAU

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

CONTEXT = {"context": {"page_size": 4, "min_pages": 8, "ratio": 0.05, "last_pages": 2}}
"""32 tokens, so that all but the shortest requests draft from chosen pages."""

DECIDING = {"scheduler": {"policy": "aspire", "probe_interval": 4, "first_draft": 2}}
"""Lengths from the cost model, which rests on measured times: all ranks must know the same ones.
Where a step of the small model costs the same whatever it reads, that means not to draft."""

WATCHDOG_S = 60


def arguments(model: Path, *extra: str) -> list[str]:
    return plain_args(
        model,
        context_length=tiny_model.CONTEXT,
        max_total_tokens=20_000,
        max_running_requests=24,
        extra=("--skip-tokenizer-init", "--enable-metrics", *extra),
    )


def start(model: Path, logs: Path, name: str, *extra: str) -> Aspire:
    """A server of two ranks, which is starting; its client."""
    config = logs / f"{name}.yaml"
    config.write_text("")
    args = arguments(model, "--tp-size", "2", "--watchdog-timeout", str(WATCHDOG_S), *extra)
    server = Server(
        aspire_args(args, config),
        log=logs / f"{name}.log",
        name=name,
        env=CHECKS | {"ASPIRE_CHECK_RANKS": "1"},
        timeout_s=START_SECONDS,
    )
    server.start()
    client = Aspire(server, True, None)
    client.config_file = config
    return client


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.save(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def two_ranks(tiny: Path, logs: Path) -> Iterator[Aspire]:
    client = start(tiny, logs, "two-ranks")
    try:
        client.server.wait_ready()
        yield client
    finally:
        client.server.stop()


def prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(3, tiny_model.VOCAB) for _ in range(length)]


def assert_in_step(client: Aspire, before: dict, scheduler: dict) -> None:
    """Every decode step since ``before`` was compared; where drafts are sure to be made, some were
    accepted and some rejected."""
    now = client.aspire()
    assert now["ranks"]["tp_size"] == 2
    assert now["ranks"]["checked_steps"] == now["decode_steps"] > before["decode_steps"]
    if scheduler is DRAFTING:
        assert now["accepted_drafts"] > before["accepted_drafts"] + 100
        assert now["discarded_drafts"] > before["discarded_drafts"] + 100
    client.assert_invariants()


def test_ranks_start_alike(two_ranks):
    log = two_ranks.server.log.read_text()
    fits = {line.split("step cost: ")[1] for line in log.splitlines() if "step cost: " in line}
    assert len(fits) == 1, fits
    assert "profiled here" in fits.pop()
    cores = len(os.sched_getaffinity(0))
    assert log.count(f"aspire-cpu: {max(1, cores // 2)} threads for this rank") == 2


@pytest.mark.parametrize("scheduler", [DRAFTING, DECIDING], ids=["staggered", "aspire"])
def test_greedy_texts_are_the_models_own(two_ranks, tiny, scheduler):
    two_ranks.begin_test()
    two_ranks.configure(scheduler, CONTEXT)
    before = two_ranks.aspire()
    rng = random.Random(1)
    prompts = [prompt(rng, length) for length in (5, 40, 90, 150, 300, 500, 900, 1500)]
    answers = two_ranks.generate_all(prompts, max_new_tokens=48, ignore_eos=True)
    model = tiny_model.load(tiny)
    for ids, answer in zip(prompts, answers, strict=True):
        assert max(tiny_model.gaps(model, ids, answer["output_ids"])) <= TAU
    assert_in_step(two_ranks, before, scheduler)


def send_many(client: Aspire, requests: int, seed: int) -> None:
    """Requests of every kind, two dozen at a time; some are aborted."""
    rng = random.Random(seed)
    bodies = []
    for i in range(requests):
        options = {
            "temperature": 0 if i % 10 == 9 else 1.0,
            "max_new_tokens": rng.randint(1, 24),
            "ignore_eos": bool(i % 3),
            "rid": f"many-{seed}-{i}",
        }
        if i % 4 == 1:
            options |= {"top_p": 0.9, "top_k": 40}
        if i % 5 == 2:
            options |= {"sampling_seed": i}
        if i % 7 == 3:
            options |= {"repetition_penalty": 1.2}
        if i % 11 == 4:
            options |= {"return_logprob": True}
        bodies.append(request(prompt(rng, rng.choice((3, 30, 120, 400))), **options))

    def one(i: int) -> None:
        if i % 9 == 5:
            client.http.post("/abort_request", json={"rid": f"many-{seed}-{i - 2}"})
        reply = client.post(bodies[i])
        assert reply.status_code == 200, reply.text

    with ThreadPoolExecutor(24) as pool:
        list(pool.map(one, range(requests)))


def test_three_hundred_sampled_requests(two_ranks):
    """A rank that waits for a message that is not sent hangs until the watchdog ends the server."""
    two_ranks.begin_test()
    two_ranks.configure(DRAFTING, CONTEXT)
    before = two_ranks.aspire()
    send_many(two_ranks, 300, seed=2)
    assert_in_step(two_ranks, before, DRAFTING)


def test_a_thousand_requests_without_a_disagreement(two_ranks):
    for seed, scheduler in enumerate((DECIDING, DRAFTING)):
        two_ranks.begin_test()
        two_ranks.configure(scheduler, CONTEXT)
        before = two_ranks.aspire()
        send_many(two_ranks, 500, seed=10 + seed)
        assert_in_step(two_ranks, before, scheduler)


def test_one_rank_and_two_give_the_same_texts(tiny, logs, two_ranks):
    """Greedy texts and the drafts accepted on the way, against a server of one rank."""
    config = logs / "one-rank.yaml"
    config.write_text("")
    server = Server(
        aspire_args(arguments(tiny), config),
        log=logs / "one-rank.log",
        name="one rank",
        timeout_s=START_SECONDS,
    )
    rng = random.Random(6)
    prompts = [prompt(rng, length) for length in (5, 40, 90, 150, 300, 500, 900, 1500)]
    found = []
    with server:
        one_rank = Aspire(server, True, None)
        one_rank.config_file = config
        for client in (one_rank, two_ranks):
            client.configure(DRAFTING, CONTEXT)
            answers = client.generate_all(prompts, max_new_tokens=64, ignore_eos=True)
            speculated(answers)
            found.append(answers)
    for one, two in zip(*found, strict=True):
        assert one["output_ids"] == two["output_ids"]
    # All heads vote, so drafts are as good as with one rank.
    rates = [
        sum(a["meta_info"]["spec_num_correct_drafts"] for a in answers)
        / sum(a["meta_info"]["aspire"]["draft_steps"] for a in answers)
        for answers in found
    ]
    assert abs(rates[0] - rates[1]) < 0.03, rates


def rank_process(client: Aspire, rank: int) -> psutil.Process:
    for process in session_members(client.server.pid):
        if f"scheduler_TP{rank}" in " ".join(process.cmdline()):
            return process
    raise AssertionError(f"no process of rank {rank}")


def assert_ends(client: Aspire, seconds: float) -> None:
    """The server ends by itself and leaves no process behind."""
    session = client.server.pid
    deadline = time.monotonic() + seconds
    while left := session_members(session):
        assert time.monotonic() < deadline, [process.cmdline() for process in left]
        time.sleep(0.2)


def test_a_killed_rank_ends_the_server(two_ranks):
    """Last of this server's tests."""
    two_ranks.configure(DRAFTING, CONTEXT)
    rng = random.Random(4)
    bodies = [
        request(prompt(rng, 200), max_new_tokens=1500, ignore_eos=True, temperature=1.0)
        for _ in range(8)
    ]
    victim = rank_process(two_ranks, 1)
    before = two_ranks.aspire()["decode_steps"]
    with ThreadPoolExecutor(8) as pool:
        jobs = [pool.submit(two_ranks.post, body) for body in bodies]
        while two_ranks.aspire()["decode_steps"] < before + 20:
            time.sleep(0.05)
        assert not any(job.done() for job in jobs), "void: the requests were over"
        victim.send_signal(signal.SIGKILL)
        assert_ends(two_ranks, 30)
        for job in jobs:
            with pytest.raises(httpx.TransportError):
                job.result(timeout=10)


def spoiler() -> str:
    """A logit processor that changes the drafts of rank 1 behind its back, once."""
    from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

    # Defined here, it travels to the server by value.
    class Spoiler(CustomLogitProcessor):
        def __call__(self, logits, custom_param_list=None):
            import gc

            import torch.distributed as dist

            if dist.get_rank() == 1:
                for thing in gc.get_objects():
                    if type(thing).__name__ == "DraftState":
                        thing.tokens += 1
            return logits

    return Spoiler.to_str()


def test_ranks_that_part_stop_the_server(tiny, logs):
    client = start(tiny, logs, "parting-ranks", "--enable-custom-logit-processor")
    try:
        client.server.wait_ready()
        client.configure(DRAFTING, CONTEXT)
        body = request(
            prompt(random.Random(5), 100),
            max_new_tokens=200,
            ignore_eos=True,
            custom_logit_processor=spoiler(),
        )
        with pytest.raises(httpx.TransportError):
            client.post(body)
        assert_ends(client, 30)
    finally:
        client.server.stop()
    sentence = "tensor-parallel ranks disagree about the tokens of decode step"
    assert sentence in client.server.log.read_text()
