"""Pauses, flushes, cancelled neighbours, batches and many requests (B20, B23, B32, B33)."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.server.client import request
from tests.server.conftest import DRAFTING, FULL, TINY, speculated
from tests.server.prompts import COUNT, IDS, LOOP, PROSE, SHORT
from tests.server.scoring import assert_greedy

RUNNING = [PROSE, COUNT, IDS]


def wait_for_steps(aspire, steps: int) -> None:
    """Until that many more decode steps were made."""
    start, deadline = aspire.aspire()["decode_steps"], time.monotonic() + 60
    while aspire.aspire()["decode_steps"] < start + steps:
        assert time.monotonic() < deadline, "nothing runs"
        time.sleep(0.02)


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_pause_and_continue(plain, aspire, mode):
    """Drafts that wait over a pause, or are lost in it, change no text."""
    aspire.configure(DRAFTING)
    options = {"max_new_tokens": 40, "ignore_eos": True}
    expected = [a["output_ids"] for a in plain.generate_all(RUNNING, **options)]
    with ThreadPoolExecutor(3) as pool:
        jobs = [pool.submit(aspire.generate, prompt, **options) for prompt in RUNNING]
        wait_for_steps(aspire, 5)
        assert aspire.post({"mode": mode}, "/pause_generation").status_code == 200
        paused = aspire.aspire()["decode_steps"]
        time.sleep(1)
        assert aspire.aspire()["decode_steps"] <= paused + 1, "it did not pause"
        assert not any(job.done() for job in jobs), "void: the requests were over"
        assert aspire.post({}, "/continue_generation").status_code == 200
        answers = [job.result() for job in jobs]
    speculated(answers)
    assert [a["output_ids"] for a in answers] == expected


def test_pause_that_aborts(plain, aspire):
    aspire.configure(DRAFTING)
    with ThreadPoolExecutor(3) as pool:
        body = {"max_new_tokens": 2000, "ignore_eos": True}
        jobs = [pool.submit(aspire.post, request(prompt, **body)) for prompt in RUNNING]
        wait_for_steps(aspire, 5)
        assert aspire.post({"mode": "abort"}, "/pause_generation").status_code == 200
        aspire.post({}, "/continue_generation")
        for prompt, job in zip(RUNNING, jobs, strict=True):
            answer = job.result(timeout=60).json()
            assert answer["meta_info"]["finish_reason"]["type"] == "abort"
            assert_greedy(plain, plain.ids(prompt), answer["output_ids"])
    speculated(aspire.generate(COUNT, max_new_tokens=12, ignore_eos=True))


def test_flush_while_running_is_refused_and_harmless(plain, aspire):
    aspire.configure(DRAFTING)
    options = {"max_new_tokens": 40, "ignore_eos": True}
    expected = [a["output_ids"] for a in plain.generate_all(RUNNING, **options)]
    with ThreadPoolExecutor(3) as pool:
        jobs = [pool.submit(aspire.generate, prompt, **options) for prompt in RUNNING]
        wait_for_steps(aspire, 3)
        reply = aspire.post({}, "/flush_cache")
        assert not any(job.done() for job in jobs), "void: the requests were over"
        answers = [job.result() for job in jobs]
    assert not reply.text.startswith("Cache flushed")
    speculated(answers)
    assert [a["output_ids"] for a in answers] == expected


def test_cancelled_requests_leave_their_shared_prefix_intact(plain, aspire):
    """B23: some requests of a common prefix are cancelled and sent again at once."""
    aspire.configure(DRAFTING, TINY)
    rng = random.Random(5)
    prefix = plain.ids(" ".join(SHORT))
    options = {"max_new_tokens": 16, "ignore_eos": True}
    for length in (127, 128):
        aspire.flush()
        prompts = [prefix[:length] + plain.ids(f" {i}. {SHORT[i]}") for i in range(6)]
        prompts += [plain.ids(text) for text in (PROSE, COUNT)]
        cancelled = {f"cancel-{length}-{i}": prompts[i] for i in (1, 4)}

        def cancel(rid: str, prompt: list[int]) -> dict:
            killer = threading.Timer(
                rng.uniform(0.02, 0.5), lambda: aspire.post({"rid": rid}, "/abort_request")
            )
            killer.start()
            aspire.post(request(prompt, rid=rid, max_new_tokens=500, ignore_eos=True))
            killer.join()
            return aspire.generate(prompt, **options)

        with ThreadPoolExecutor(len(prompts) + 2) as pool:
            retried = [pool.submit(cancel, rid, prompt) for rid, prompt in cancelled.items()]
            answers = list(pool.map(lambda p: aspire.generate(p, **options), prompts))
            answers += [job.result() for job in retried]
        speculated(answers)
        sent = prompts + list(cancelled.values())
        for prompt, answer in zip(sent, answers, strict=True):
            assert_greedy(plain, prompt, answer["output_ids"])


def test_batch_of_prompts_with_their_own_parameters(plain, aspire):
    """B32: one call, seven prompts, seven lengths that end together or apart."""
    aspire.configure(DRAFTING)
    prompts = SHORT[:7]
    params = [
        {"temperature": 0, "max_new_tokens": 12 + (i % 3) * 6, "ignore_eos": True} for i in range(7)
    ]
    body = {"text": prompts, "sampling_params": params, "rid": [f"batch-{i}" for i in range(7)]}
    expected, found = plain.post(body).json(), aspire.post(body).json()
    speculated(found)
    assert [a["meta_info"]["id"] for a in found] == body["rid"]
    assert [a["output_ids"] for a in found] == [a["output_ids"] for a in expected]


def test_copies_in_a_batch(plain, aspire):
    """B32: n copies of each prompt of a list."""
    aspire.configure(DRAFTING)
    params = {"n": 3, "temperature": 0, "max_new_tokens": 16, "ignore_eos": True}
    body = {"text": [PROSE, COUNT], "sampling_params": params}
    expected, found = plain.post(body).json(), aspire.post(body).json()
    speculated(found)
    assert len(found) == 6
    assert [a["output_ids"] for a in found] == [a["output_ids"] for a in expected]


def test_next_turn_over_interleaved_slots(plain, aspire):
    """B33c, d: a cached conversation whose KV slots lie between those of its neighbours."""
    aspire.configure(DRAFTING, FULL)
    aspire.flush()
    first = [plain.ids(text) for text in SHORT[:4]]
    options = {"max_new_tokens": 36, "ignore_eos": True}
    answers = aspire.generate_all(first, **options)
    turns = [
        ids + answer["output_ids"] + plain.ids(" And then?")
        for ids, answer in zip(first, answers, strict=True)
    ]
    answers = aspire.generate_all(turns, **options)
    speculated(answers)
    for turn, answer in zip(turns, answers, strict=True):
        assert answer["meta_info"]["cached_tokens"] >= len(turn) - 6
        assert answer["meta_info"]["spec_accept_rate"] >= 0.99
        assert_greedy(plain, turn, answer["output_ids"])


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_five_hundred_requests_leak_nothing(aspire):
    """B20: every kind of request, a fifth of them aborted; used tokens are 0 after each flush."""
    aspire.configure(DRAFTING)
    rng = random.Random(11)
    text = aspire.ids((PROSE + LOOP) * 4)

    def one(i: int) -> None:
        options = {"max_new_tokens": rng.randint(1, 200), "ignore_eos": bool(i % 3)}
        if i % 2:
            options |= {"temperature": 1.0, "top_p": 0.9}
        if i % 4 == 1:
            options |= {"sampling_seed": i}
        if i % 7 == 0:
            options |= {"return_logprob": True, "top_logprobs_num": 2}
        if i % 11 == 0:
            options |= {"custom_params": {"aspire": False}}
        rid = f"many-{i}"
        if i % 5 == 0:
            threading.Timer(
                rng.uniform(0.05, 4.0), lambda: aspire.post({"rid": rid}, "/abort_request")
            ).start()
        start = rng.randint(0, 50)
        prompt = text[start : start + rng.randint(1, 200)]
        reply = aspire.post(request(prompt, rid=rid, **options))
        assert reply.status_code == 200, reply.text

    done = 0
    before = aspire.aspire()["draft_rows"]
    for upto in (1, 10, 100, 500):
        with ThreadPoolExecutor(24) as pool:
            list(pool.map(one, range(done, upto)))
        done = upto
        aspire.wait_idle()
        aspire.flush()
        # The gauge is written by the next batch: a request of one token, flushed after.
        aspire.generate(COUNT, max_new_tokens=1)
        aspire.flush()
        aspire.assert_invariants()
    assert aspire.aspire()["draft_rows"] > before + 500, "void: speculation hardly ran"
