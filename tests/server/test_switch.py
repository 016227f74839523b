"""A request decides about its own speculation (F03), and its answer says what was done (F16)."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.server.client import request
from tests.server.conftest import DRAFTING, speculated
from tests.server.prompts import COUNT, PROSE

OPTIONS = {"max_new_tokens": 24, "ignore_eos": True}


def wish(value) -> dict:
    return {"custom_params": {"aspire": value}}


def test_each_request_of_a_batch_has_its_own_switch(plain, aspire):
    aspire.configure(DRAFTING)
    wishes = [None, False, {"gamma_max": 2}, True, {"gamma_max": 0}, {"gamma_max": 16}]
    expected = plain.generate(PROSE, **OPTIONS)["output_ids"]
    with ThreadPoolExecutor(len(wishes)) as pool:
        jobs = [
            pool.submit(aspire.generate, PROSE, **OPTIONS, **({} if w is None else wish(w)))
            for w in wishes
        ]
        answers = [job.result() for job in jobs]
    assert [a["output_ids"] for a in answers] == [expected] * len(wishes)
    found = [a["meta_info"]["aspire"] for a in answers]
    assert [f["speculated"] for f in found] == [True, False, True, True, False, True]
    off = "off by request"
    assert [f["speculation"] for f in found] == ["on", off, "on", "on", off, "on"]
    assert [f["request_gamma_max"] for f in found] == [None, 0, 2, None, 0, 16]
    longest = [max(map(int, f["draft_lengths"])) for f in found]
    # The policy of this test drafts five.
    assert longest == [5, 0, 2, 5, 0, 5]


def test_switch_through_the_openai_doors(aspire):
    aspire.configure(DRAFTING)
    speculated(aspire.generate(COUNT, **OPTIONS))
    before = aspire.aspire()["draft_rows"]
    body = {"model": "m", "temperature": 0, "max_tokens": 16, **wish(False)}
    completion = aspire.post(body | {"prompt": COUNT}, "/v1/completions")
    message = {"messages": [{"role": "user", "content": "Hi"}]}
    chat = aspire.post(body | message, "/v1/chat/completions")
    assert (completion.status_code, chat.status_code) == (200, 200)
    assert aspire.aspire()["draft_rows"] == before
    body |= wish({"gamma_max": 1})
    assert aspire.post(body | {"prompt": COUNT}, "/v1/completions").status_code == 200
    assert aspire.aspire()["draft_rows"] > before


@pytest.mark.parametrize(
    ("params", "names"),
    [
        ({"aspire": "off"}, ["custom_params.aspire", "off"]),
        ({"aspire": {"gama_max": 1}}, ["gama_max", "gamma_max"]),
        ({"aspire": {"gamma_max": -1}}, ["gamma_max", "-1"]),
        ({"aspire": {"gamma_max": 17}}, ["gamma_max is 17", "at most 16 drafts"]),
        ({"asprie": False}, ["asprie", "'aspire'"]),
    ],
)
def test_bad_switch_is_a_400(aspire, params, names):
    reply = aspire.post(request(PROSE, custom_params=params, **OPTIONS))
    assert reply.status_code == 400
    assert [name for name in names if name not in reply.text] == []
