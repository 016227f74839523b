"""Request bodies that SGLang answers with a server error, or does not survive: refused first.

SGLang builds its sampling parameters without looking at types, expands ``n`` copies without limit,
and sends numbers of any size to the scheduler, which ends when a tensor cannot hold them.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import numpy as np
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor
from sglang.srt.sampling.sampling_params import SamplingParams

MOST_COPIES = 4096
"""Largest ``n``: each copy is a request of its own."""

# Filled by SGLang itself, although its constructor takes them.
_INTERNAL = {
    "stop_strs", "stop_regex_strs", "stop_str_max_len", "stop_regex_max_len", "is_normalized",
}  # fmt: skip
_TYPES = {
    field.name: field.type
    for field in msgspec.structs.fields(SamplingParams)
    if field.name not in _INTERNAL
}
_INT32, _INT64 = 2**31, 2**63
# Processors and seeds have checks of their own.
_ANY_SIZE = {"custom_params", "sampling_seed"}
_MOST_BIAS = 1e30
_ONE_VALUE = {
    "return_logprob": bool,
    "logprob_start_len": int,
    "top_logprobs_num": int,
    "custom_logit_processor": str,
    "lora_path": str,
}
# xgrammar's compiler crashes at the end of a C string within one.
_GRAMMARS = {"json_schema", "regex", "ebnf", "structural_tag"}


def check_body(original: Callable[..., Any], manager: Any, obj: Any, request: Any = None) -> Any:
    """AROUND ``TokenizerManager.generate_request``.

    Raises:
        ValueError: the body holds text that is not Unicode, or its sampling parameters are not
            what they must be.
    """
    if manager.server_args.attention_backend == "aspire" and isinstance(obj, GenerateReqInput):
        for name in ("text", "rid", "sampling_params", "custom_logit_processor", "lora_path"):
            _check_unicode(name, getattr(obj, name, None))
        for name in ("logprob_start_len", "top_logprobs_num", "token_ids_logprob", "priority"):
            _check_sizes(name, getattr(obj, name, None))
        if obj.rid is not None and not obj.rid:
            raise ValueError("rid must not be empty; leave it out for a random one.")
        params = obj.sampling_params
        for each in params if isinstance(params, list) else [params]:
            check_sampling_params(each)
    return original(manager, obj, request)


def check_sampling_params(params: dict[str, Any] | None) -> None:
    """Refuse unknown names, wrong types, and numbers that no tensor holds.

    Raises:
        ValueError: naming the parameter.
    """
    if params is None:
        return
    if not isinstance(params, dict):
        raise ValueError(f"sampling_params must be an object, not {params!r}.")
    for name, value in params.items():
        if name not in _TYPES:
            near = difflib.get_close_matches(name, _TYPES, n=1, cutoff=0.0)
            raise ValueError(f"unknown sampling parameter '{name}'; did you mean '{near[0]}'?")
        if value is not None:
            _check_value(name, value)
    copies = params.get("n")
    if copies is not None and not 1 <= copies <= MOST_COPIES:
        raise ValueError(f"n must be 1 to {MOST_COPIES}, not {copies}.")


def _check_value(name: str, value: Any) -> None:
    if name == "custom_params":
        # Its forms are explained where it is read.
        return
    if name == "stop_token_ids" and isinstance(value, list):
        value = [token for token in value if token is not None]
    try:
        msgspec.convert(value, type=_TYPES[name])
    except msgspec.ValidationError as fault:
        raise ValueError(f"sampling parameter '{name}': {fault}.") from None
    if name in _ANY_SIZE:
        return
    if _TYPES[name] is float:
        _check_float32(name, value)
    if name in _GRAMMARS and "\x00" in value:
        raise ValueError(f"sampling parameter '{name}' must not hold a NUL character.")
    if name == "stop_regex":
        _check_patterns(value)
    limit = _INT32 if name == "top_k" else _INT64
    for number in _integers(value):
        if not -limit <= number < limit:
            raise ValueError(f"sampling parameter '{name}': {number} is too large.")
    if name == "logit_bias" and any(not abs(bias) <= _MOST_BIAS for bias in value.values()):
        raise ValueError(f"sampling parameter '{name}': a bias is too large.")


def _check_float32(name: str, value: float) -> None:
    # The tensors that take it are float32: infinity and an exact zero mean something else there.
    with np.errstate(over="ignore", under="ignore"):
        stored = np.float32(value)
    if not np.isfinite(stored) or (stored == 0) != (value == 0):
        raise ValueError(f"sampling parameter '{name}': {value} does not fit into a float32.")


def check_single(request: Any) -> None:
    """Refuse a list where one prompt has one value, which SGLang hands on as it is.

    Raises:
        ValueError: naming the field.
    """
    for name, kind in _ONE_VALUE.items():
        value = getattr(request, name, None)
        if value is not None and not isinstance(value, kind):
            raise ValueError(f"{name} must be of type {kind.__name__}, not {value!r}.")
    listed = getattr(request, "token_ids_logprob", None)
    if listed is not None and not all(isinstance(token, int) for token in listed):
        raise ValueError(f"token_ids_logprob must be a list of token ids, not {listed!r}.")


def _check_patterns(value: str | list[str]) -> None:
    for pattern in [value] if isinstance(value, str) else value:
        try:
            re.compile(pattern)
        except (re.error, OverflowError, RecursionError) as fault:
            raise ValueError(f"stop_regex: {pattern!r} is no pattern ({fault}).") from None


def check_processor(serialized: Any) -> None:
    """Refuse a custom logit processor that cannot be loaded, which ends the scheduler.

    Raises:
        ValueError: it is not the text that its class's ``to_str`` gives.
    """
    if not serialized:
        return
    try:
        CustomLogitProcessor.from_str(serialized)
    except Exception as fault:  # whatever loading someone's class may raise
        raise ValueError(
            f"custom_logit_processor cannot be loaded ({type(fault).__name__}: {fault})."
        ) from None


def _check_sizes(name: str, value: Any) -> None:
    if isinstance(value, list):
        for entry in value:
            _check_sizes(name, entry)
    elif isinstance(value, int) and not -_INT64 <= value < _INT64:
        raise ValueError(f"{name}: {value} is too large.")


def _integers(value: Any) -> Iterable[int]:
    values = value if isinstance(value, list) else [value]
    return (number for number in values if isinstance(number, int))


def _check_unicode(name: str, value: Any) -> None:
    match value:
        case str():
            try:
                value.encode()
            except UnicodeEncodeError:
                raise ValueError(f"{name} holds half of a surrogate pair: no text.") from None
        case list():
            for entry in value:
                _check_unicode(name, entry)
        case dict():
            for key, entry in value.items():
                _check_unicode(name, key)
                _check_unicode(name, entry)
