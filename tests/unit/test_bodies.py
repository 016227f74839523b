"""Sampling parameters of wrong types and sizes are refused by name."""

import asyncio
from types import SimpleNamespace

import pytest
from sglang.srt.managers.io_struct import GenerateReqInput

from aspire_sglang.runtime import parse_errors
from aspire_sglang.runtime.bodies import (
    MOST_COPIES,
    check_body,
    check_processor,
    check_sampling_params,
    check_single,
)


@pytest.mark.parametrize(
    "params",
    [
        None,
        {},
        {"temperature": 1, "top_p": None, "n": 3, "stop": ["a"], "stop_token_ids": [1, None]},
        {"logit_bias": {"5": -100}, "custom_params": {"aspire": False}, "top_k": -1},
        {"max_new_tokens": 2**40, "sampling_seed": 2**62},
    ],
)
def test_what_sglang_understands_passes(params):
    check_sampling_params(params)


@pytest.mark.parametrize(
    ("params", "names"),
    [
        ("hot", ["sampling_params", "'hot'"]),
        ({"tempature": 1}, ["'tempature'", "'temperature'"]),
        ({"is_normalized": True}, ["'is_normalized'"]),
        ({"temperature": "hot"}, ["'temperature'", "float"]),
        ({"max_new_tokens": 1.5}, ["'max_new_tokens'", "int"]),
        ({"ignore_eos": 1}, ["'ignore_eos'", "bool"]),
        ({"stop": [1]}, ["'stop'"]),
        ({"stop_token_ids": ["a"]}, ["'stop_token_ids'"]),
        ({"logit_bias": {"5": "much"}}, ["'logit_bias'"]),
        ({"logit_bias": {"5": 1e300}}, ["'logit_bias'"]),
        ({"top_k": 2**31}, ["'top_k'"]),
        ({"max_new_tokens": 2**63}, ["'max_new_tokens'"]),
        ({"stop_token_ids": [2**63]}, ["'stop_token_ids'"]),
        ({"temperature": 1e308}, ["'temperature'", "1e+308", "float32"]),
        ({"top_p": 1e-320}, ["'top_p'", "float32"]),
        ({"repetition_penalty": 1e-50}, ["'repetition_penalty'", "float32"]),
        ({"stop_regex": "["}, ["stop_regex", "'['"]),
        ({"regex": "a\x00"}, ["'regex'", "NUL"]),
        ({"n": 0}, ["n must be"]),
        ({"n": MOST_COPIES + 1}, ["n must be", str(MOST_COPIES)]),
    ],
)
def test_the_rest_is_refused_by_name(params, names):
    with pytest.raises(ValueError, match=r"sampling|stop_regex|n must be") as refused:
        check_sampling_params(params)
    assert [name for name in names if name not in str(refused.value)] == []


def manager(backend: str) -> SimpleNamespace:
    return SimpleNamespace(server_args=SimpleNamespace(attention_backend=backend))


@pytest.mark.parametrize(
    "field",
    [{"logprob_start_len": 2**63}, {"token_ids_logprob": [[1], [2**64]]}, {"priority": -(2**70)}],
)
def test_numbers_that_no_message_holds_are_refused(field):
    with pytest.raises(ValueError, match=next(iter(field))):
        check_body(lambda *_: None, manager("aspire"), GenerateReqInput(text="a", **field))


@pytest.mark.parametrize(
    "field",
    [
        {"text": "a\ud800"},
        {"text": ["good", "\udfff"]},
        {"rid": "\ud800"},
        {"sampling_params": {"stop": ["\ud800"]}},
        {"sampling_params": {"\ud800": 1}},
    ],
)
def test_half_a_character_is_refused(field):
    request = GenerateReqInput(**{"text": "a", **field})
    with pytest.raises(ValueError, match="surrogate") as refused:
        check_body(lambda *_: None, manager("aspire"), request)
    # It must be possible to send the answer.
    str(refused.value).encode()
    check_body(lambda *_: None, manager("fa3"), request)


@pytest.mark.parametrize("processor", ["a", "{}", '{"callable": "00"}', ["a"], {"a": 1}, 5])
def test_processors_that_cannot_be_loaded_are_refused(processor):
    with pytest.raises(ValueError, match="custom_logit_processor cannot be loaded"):
        check_processor(processor)


def test_processors_that_load_pass():
    from sglang.srt.sampling.custom_logit_processor import DisallowedTokensLogitsProcessor

    check_processor(DisallowedTokensLogitsProcessor.to_str())
    check_processor(None)


def test_only_faults_of_parsing_are_answered():
    """As FastAPI calls a parser, and as anything else of the server may fail."""

    def request_body_to_args():
        raise TypeError("no object")

    def route():
        raise TypeError("a fault of the server")

    request = SimpleNamespace(url=SimpleNamespace(path="/v1/chat/completions"))

    def answered(function):
        try:
            function()
        except TypeError as fault:
            return asyncio.run(parse_errors.answer(request, fault))

    reply = answered(request_body_to_args)
    assert reply.status_code == 400
    assert "/v1/chat/completions" in reply.body.decode()
    with pytest.raises(TypeError, match="server"):
        answered(route)


@pytest.mark.parametrize(
    ("field", "refused"),
    [
        ({"top_logprobs_num": [1]}, True),
        ({"logprob_start_len": [0]}, True),
        ({"token_ids_logprob": [[1]]}, True),
        ({"custom_logit_processor": ["a"]}, True),
        ({"return_logprob": True, "top_logprobs_num": 1, "token_ids_logprob": [1]}, False),
        ({}, False),
    ],
)
def test_one_prompt_takes_one_value(field, refused):
    if not refused:
        return check_single(SimpleNamespace(**field))
    with pytest.raises(ValueError, match=next(iter(field))):
        check_single(SimpleNamespace(**field))
