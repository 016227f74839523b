"""Request bodies of every wrong kind (B35): each gets a 4xx with a sentence or a 200, and the next
request is served as if nothing had happened."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.server.conftest import DRAFTING
from tests.server.prompts import COUNT

QUIET = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
SHORT_PROFILE = settings(
    max_examples=40, derandomize=True, deadline=None, suppress_health_check=QUIET, database=None,
    phases=[Phase.generate],
)  # fmt: skip
LONG_PROFILE = settings(
    max_examples=1500, deadline=None, suppress_health_check=QUIET, print_blob=True, database=None
)

LIMIT = {"max_new_tokens": 4}
VALID = {
    "/generate": {"text": "Hello", "sampling_params": dict(LIMIT)},
    "/v1/completions": {"model": "m", "prompt": "Hello", "max_tokens": 4},
    "/v1/chat/completions": {
        "model": "m",
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": 4,
    },
}
FIELDS = {
    "/generate": (
        "text input_ids rid stream return_logprob logprob_start_len top_logprobs_num "
        "token_ids_logprob return_hidden_states custom_logit_processor session_params lora_path "
        "sampling_params stream_options priority image_data input_embeds nonsense"
    ),
    "/v1/completions": (
        "prompt max_tokens temperature top_p n stop seed logprobs echo stream logit_bias suffix "
        "user frequency_penalty custom_params nonsense"
    ),
    "/v1/chat/completions": (
        "messages max_tokens temperature top_p n stop seed logprobs top_logprobs stream logit_bias "
        "tools tool_choice response_format custom_params nonsense"
    ),
}
SAMPLING = (
    "max_new_tokens min_new_tokens temperature top_p top_k min_p frequency_penalty "
    "presence_penalty repetition_penalty stop stop_token_ids stop_regex ignore_eos n regex "
    "json_schema ebnf structural_tag logit_bias sampling_seed custom_params no_stop_trim "
    "stream_interval nonsense"
)

NASTY: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63), 2**80, 0.5, -0.5, 1e308, -1e308,
    "", "a", "\ud800", "\x00", "ÿ🚀" * 50, [], [None], [[]], [-1], [2**40], ["a", 1], [["a"]],
    {}, {"a": None}, {"5": 1e9}, {"-1": 1.0}, {"99999999": 1.0}, {"x": "y"}, {"aspire": "off"},
    {"aspire": {"gamma_max": 2**40}}, [0.5], "(", "[", "{}", '{"type": "nonsense"}', [[1, 2], []],
)  # fmt: skip

BROKEN = st.one_of(
    st.binary(max_size=60),
    st.sampled_from(
        (
            b"",
            b"{",
            b"null",
            b"[]",
            b'"text"',
            b'{"text": "a"',
            b'{"text": "\xff\xfe"}',
            b'{"text": "\\ud800"}',
            b'{"text": NaN}',
            b'{"text": "a", "sampling_params": {"temperature": NaN}}',
            b'{"text": "a", "sampling_params": {"temperature": Infinity}}',
            b'{"text": "a", "text": 5}',
            b"[" * 5000,
        )
    ),
)


@st.composite
def bodies(draw: st.DrawFn) -> tuple[str, bytes]:
    """A path, and a body with one to three entries replaced by something wrong."""
    path = draw(st.sampled_from(sorted(VALID)))
    if draw(st.integers(0, 5)) == 0:
        return path, draw(BROKEN)
    body = copy.deepcopy(VALID[path])
    for _ in range(draw(st.integers(1, 3))):
        value = copy.deepcopy(draw(st.sampled_from(NASTY)))
        params = body.get("sampling_params")
        if isinstance(params, dict) and draw(st.booleans()):
            params[draw(st.sampled_from(SAMPLING.split()))] = value
        else:
            body[draw(st.sampled_from(FIELDS[path].split()))] = value
    return path, json.dumps(body).encode()


def check(client: Any, path: str, body: bytes) -> None:
    reply = client.http.post(path, content=body, headers={"Content-Type": "application/json"})
    assert reply.status_code == 200 or 400 <= reply.status_code < 500, (
        f"{reply.status_code}: {reply.text[:300]}"
    )
    if reply.status_code != 200:
        assert len(reply.text) > 20, "a sentence says what is wrong"
        assert "Traceback" not in reply.text


def fuzz(profile: settings, client: Any) -> None:
    client.configure(DRAFTING)
    options = {"max_new_tokens": 8, "ignore_eos": True}
    expected = client.generate(COUNT, **options)["output_ids"]

    @profile
    @given(bodies())
    def run(case):
        path, body = case
        check(client, path, body)
        assert client.generate(COUNT, **options)["output_ids"] == expected

    run()
    client.wait_idle()


def test_wrong_bodies(aspire):
    fuzz(SHORT_PROFILE, aspire)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_many_wrong_bodies(aspire):
    fuzz(LONG_PROFILE, aspire)
