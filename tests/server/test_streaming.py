"""Streams: no token missing, doubled or split (B36), and figures that agree (B37)."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest

from tests.server.client import request
from tests.server.conftest import DRAFTING, FULL, speculated
from tests.server.prompts import COUNT, LOOP, PROSE

EMOJI = "Repeat this line: 你好。世界 🚀🌍 naïve café — 你好。世界 🚀🌍 naïve café — 你好。"


def events(client, path: str, body: dict) -> list[dict]:
    found = []
    with client.http.stream("POST", path, json=body | {"stream": True}) as reply:
        assert reply.status_code == 200
        for line in reply.iter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                found.append(json.loads(line[6:]))
    return found


@pytest.mark.parametrize("prompt", [LOOP, EMOJI, COUNT], ids=["loop", "multibyte", "count"])
@pytest.mark.parametrize("interval", [1, 4])
def test_native_stream_equals_whole_answer(aspire, prompt, interval):
    aspire.configure(DRAFTING, FULL)
    options = {"max_new_tokens": 50, "ignore_eos": True, "stream_interval": interval}
    whole = aspire.generate(prompt, **options)
    speculated(whole)
    chunks = events(aspire, "/generate", request(prompt, **options))
    assert chunks[-1]["text"] == whole["text"]
    assert chunks[-1]["output_ids"] == whole["output_ids"]
    counts = [chunk["meta_info"]["completion_tokens"] for chunk in chunks]
    # Rows that only drafted must not send anything: every event brings new tokens.
    assert all(a < b for a, b in pairwise(counts)), counts
    assert [bool(c["meta_info"]["finish_reason"]) for c in chunks] == [False] * (
        len(chunks) - 1
    ) + [True]
    assert "\ufffd" not in whole["text"] or prompt == EMOJI


@pytest.mark.parametrize("stop", [None, "15"])
def test_openai_stream_equals_whole_answer(aspire, stop):
    aspire.configure(DRAFTING, FULL)
    body = {"model": "m", "prompt": COUNT, "max_tokens": 60, "temperature": 0, "stop": stop}
    whole = aspire.post(body, "/v1/completions").json()
    chunks = events(aspire, "/v1/completions", body | {"stream_options": {"include_usage": True}})
    text = "".join(c["choices"][0]["text"] for c in chunks if c["choices"])
    assert text == whole["choices"][0]["text"]
    finished = [c["choices"][0]["finish_reason"] for c in chunks if c["choices"]]
    assert [f for f in finished if f] == [whole["choices"][0]["finish_reason"]]
    usage = [c["usage"] for c in chunks if c.get("usage")]
    assert usage[-1]["completion_tokens"] == whole["usage"]["completion_tokens"]


def test_metrics_agree(aspire):
    """B37: meta_info, /server_info and Prometheus tell the same story."""
    aspire.configure(DRAFTING, FULL)
    before, tokens_before = aspire.aspire(), aspire.metric("sglang:generation_tokens_total")
    answer = aspire.generate(LOOP, rid="metrics", max_new_tokens=200, ignore_eos=True)
    after = aspire.aspire()
    meta = answer["meta_info"]
    assert meta["spec_accept_length"] == pytest.approx(200 / meta["spec_verify_ct"])
    assert 0 <= meta["spec_accept_rate"] <= 1
    assert meta["spec_verify_ct"] == meta["aspire"]["verify_steps"]
    assert meta["completion_tokens"] > meta["spec_verify_ct"]
    own = after["requests"]["metrics"]
    assert own["draft_lengths"] == meta["aspire"]["draft_lengths"]
    assert own["accepted_drafts"] == meta["spec_num_correct_drafts"]
    # The first token is the prefill's; the last run may be cut at the length cap.
    emitted = own["accepted_drafts"] + own["verify_steps"] + 1
    assert emitted == 200
    for key in ("draft_rows", "verify_rows", "accepted_drafts"):
        mine = {"draft_rows": "draft_steps", "verify_rows": "verify_steps"}.get(key, key)
        assert after[key] - before[key] == own[mine]
    # Prometheus is written when the request has left the server.
    aspire.wait_idle()
    assert aspire.metric("sglang:generation_tokens_total") - tokens_before == 200


def test_short_contexts_decode_plainly_by_default(aspire):
    """gamma = 0 is a choice, and the answer says that nothing was drafted."""
    answer = aspire.generate(PROSE, max_new_tokens=32, ignore_eos=True)
    found = answer["meta_info"]["aspire"]
    assert found["speculated"] == (found["draft_steps"] > 0)
    assert found["request_gamma_max"] is None
    assert found["verify_steps"] == sum(found["draft_lengths"].values())
