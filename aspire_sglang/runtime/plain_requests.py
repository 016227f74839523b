"""Requests whose parameters a GPU honours by decoding them without speculation.

On a GPU a speculative step chooses and verifies tokens on the device, from the model's own logits.
Parameters that change these logits, or want to see them, are honoured by SGLang's own plain steps:
while a request with one of them runs, its whole batch decodes plainly
(:mod:`aspire_sglang.runtime.plain_steps`). On a CPU speculation honours them all by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

SAMPLING: dict[str, Any] = {
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_new_tokens": 0,
    "logit_bias": None,
    "json_schema": None,
    "regex": None,
    "ebnf": None,
    "structural_tag": None,
}
"""Sampling parameters, each with the value that means "not used"."""

FIELDS = ("custom_logit_processor", "return_logprob", "return_hidden_states")
"""Fields of a request."""


def is_set(value: Any) -> bool:
    """Whether a field of a request asks for something."""
    # Tensors and arrays have no truth value, hence the identity tests.
    return value is not None and value is not False and value != [] and value != ""


def plain_parameters(sampling: Callable[[str], Any], request: Any) -> list[str]:
    """Names of the parameters for which a GPU decodes a request plainly.

    Args:
        sampling: a sampling parameter by its name, None if it is not given.
        request: what holds the other fields: SGLang's ``GenerateReqInput`` or ``Req``.
    """
    found = [
        name for name, neutral in SAMPLING.items() if sampling(name) not in (None, neutral, "", {})
    ]
    return found + [name for name in FIELDS if is_set(getattr(request, name, None))]


def needs_plain_steps(req: Any) -> bool:
    """Whether SGLang's ``Req`` has such parameters."""
    return bool(plain_parameters(partial(getattr, req.sampling_params), req))
