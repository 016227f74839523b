"""Aborts, disconnects, memory, and bad input (B20, B22, B35); what cannot be honoured (F07)."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.server.client import request
from tests.server.conftest import DRAFTING, TINY, speculated
from tests.server.prompts import COUNT, LOOP, PROSE, SHORT
from tests.server.scoring import assert_all_greedy, assert_greedy


def test_slots_are_returned_after_many_requests(aspire):
    """B20: random lengths, a fifth of them aborted; then every slot is free again."""
    rng = random.Random(7)
    aspire.configure(DRAFTING)

    def one(i: int) -> None:
        prompt = aspire.ids(PROSE * 12)[: rng.randint(1, 120)]
        options = {"max_new_tokens": rng.randint(1, 60), "ignore_eos": True}
        rid = f"leak-{i}"
        if i % 5 == 0:
            killer = threading.Timer(
                rng.uniform(0.05, 1.0), lambda: aspire.post({"rid": rid}, "/abort_request")
            )
            killer.start()
        aspire.post(request(prompt, rid=rid, **options))

    for count in (1, 9, 50):
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(one, range(count)))
        aspire.wait_idle()
        aspire.flush()
        aspire.generate(COUNT, max_new_tokens=1)
        aspire.flush()


def test_closed_streams_stop_decoding(aspire):
    """B22a: the client goes away after a few chunks."""
    aspire.configure(DRAFTING)
    for chunks in (1, 2, 5) * 4:
        body = request(PROSE, max_new_tokens=2000, ignore_eos=True) | {"stream": True}
        with aspire.http.stream("POST", "/generate", json=body) as reply:
            lines = (line for line in reply.iter_lines() if line)
            for _ in range(chunks):
                next(lines)
    aspire.wait_idle(15)


def test_abort_in_every_state(plain, aspire):
    """B22b, e, f: abort at random moments, twice, and reuse of the same id."""
    aspire.configure(DRAFTING, TINY)
    rng = random.Random(1)
    for _ in range(6):
        with ThreadPoolExecutor(1) as pool:
            body = request(PROSE, rid="again", max_new_tokens=2000, ignore_eos=True)
            answer = pool.submit(aspire.post, body)
            time.sleep(rng.uniform(0.02, 1.2))
            for _ in range(2):
                aspire.post({"rid": "again"}, "/abort_request")
            reply = answer.result(timeout=30).json()
        assert reply["meta_info"]["finish_reason"]["type"] == "abort"
        assert_greedy(plain, plain.ids(PROSE), reply["output_ids"])
    aspire.wait_idle()


def test_abort_all(aspire):
    """B22c, d: running and queued requests end, the server goes on."""
    aspire.configure(DRAFTING)
    with ThreadPoolExecutor(64) as pool:
        body = request(LOOP, max_new_tokens=1500, ignore_eos=True)
        waiting = [pool.submit(aspire.post, body) for _ in range(60)]
        time.sleep(2)
        aspire.post({"abort_all": True}, "/abort_request")
        for reply in waiting:
            answer = reply.result(timeout=60)
            if answer.status_code == 200:
                assert answer.json()["meta_info"]["finish_reason"]["type"] == "abort"
    aspire.wait_idle()


BAD = {
    "empty row": {"input_ids": [[1, 2, 3], []]},
    "empty rows": {"input_ids": [[]]},
    "no text": {"text": ""},
    "id beyond the vocabulary": {"input_ids": [1, 10**7]},
    "negative id": {"input_ids": [1, -5]},
    "negative length": {"text": "a", "sampling_params": {"max_new_tokens": -1}},
    "top_p 0": {"text": "a", "sampling_params": {"top_p": 0}},
    "repetition_penalty 0": {"text": "a", "sampling_params": {"repetition_penalty": 0}},
    "negative temperature": {"text": "a", "sampling_params": {"temperature": -1}},
    "no such parameter": {"text": "a", "sampling_params": {"tempature": 1}},
    "seed of a hundred bits": {"text": "a", "sampling_params": {"sampling_seed": 2**100}},
    "seed in words": {"text": "a", "sampling_params": {"sampling_seed": "seven"}},
    "more best tokens than tokens": {
        "text": "a",
        "return_logprob": True,
        "top_logprobs_num": 10**6,
    },
    "nothing": {},
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_answered_and_the_next_request_is_fine(plain, aspire, name):
    """B35: as plain decoding answers it, and never with a dead scheduler."""
    expected = plain.post(BAD[name])
    found = aspire.post(BAD[name])
    assert found.status_code == expected.status_code
    assert found.status_code == 400 or found.json()
    assert len(aspire.generate(COUNT, max_new_tokens=8)["output_ids"]) == 8


REFUSED = {
    "return_entropy": {"return_entropy": True},
    "return_sampling_mask": {"return_sampling_mask": True},
    "session_params": {"session_params": {"id": "one"}},
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_honoured_is_refused_by_name(aspire, name):
    reply = aspire.post(request(PROSE, max_new_tokens=16, **REFUSED[name]))
    assert reply.status_code == 400
    assert name in reply.text


def test_unknown_configuration_changes_nothing(aspire):
    before = aspire.aspire()["settings"]
    aspire.config_file.write_text("gama_max: 3\n")
    reply = aspire.post({"server_args": {"aspire_reload_config": 1}}, "/set_internal_state")
    assert reply.json() == [False]
    assert aspire.aspire()["settings"] == before


def test_queue_longer_than_the_batch(plain, aspire):
    """More requests than may run at once, and more tokens than fit into the pool."""
    aspire.configure(DRAFTING)
    prompts = SHORT * 2
    answers = aspire.generate_all(prompts, max_new_tokens=16, ignore_eos=True)
    speculated(answers)
    assert_all_greedy(plain, [plain.ids(prompt) for prompt in prompts[::7]], answers[::7])
