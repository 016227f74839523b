"""Which request parameters are honoured; the others are refused by name.

Prefill samples the first token with SGLang's own sampler, so a request that generates at most one
token may use everything that SGLang itself honours there. What a GPU honours in plain steps only is
listed in :mod:`aspire_sglang.runtime.plain_requests`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.managers.io_struct import GenerateReqInput

from aspire_sglang import cpu_platform
from aspire_sglang.runtime.arguments import is_aspire
from aspire_sglang.runtime.bodies import check_processor, check_single
from aspire_sglang.runtime.plain_requests import is_set
from aspire_sglang.runtime.seeds import check_seed
from aspire_sglang.runtime.switch import check_custom_params

UNSUPPORTED_FIELDS = (
    "return_sampling_mask",
    "return_entropy",
    "lora_path",
    "session_params",
    "input_embeds",
    "positional_embed_overrides",
    "image_data",
    "video_data",
    "audio_data",
)


REFUSED_ON_GPU = ("sampling_seed",)
"""Sampling parameters that only a CPU honours."""


class UnsupportedParameter(ValueError):
    """A request asks for something speculation cannot honour; answered with status 400."""


def effective_sampling(request: Any, preferred: dict[str, Any] | None = None) -> dict[str, Any]:
    """Sampling parameters of one request over those the server prefers."""
    return {**(preferred or {}), **(request.sampling_params or {})}


def unsupported_parameters(
    request: Any, on_cpu: bool, preferred: dict[str, Any] | None = None
) -> list[str]:
    """Names of the parameters of one generate request that ASPIRE cannot honour.

    Args:
        request: SGLang's ``GenerateReqInput`` for a single prompt.
        on_cpu: whether this package's CPU platform runs the model, else a GPU.
        preferred: sampling parameters that the server adds where the request is silent.
    """
    sampling = effective_sampling(request, preferred)
    found = []
    # A greedy text does not depend on the seed, so only sampled requests would be betrayed.
    seeded = sampling.get("sampling_seed") is not None and sampling.get("temperature", 1.0) != 0
    if seeded and not on_cpu:
        found.append("sampling_seed")
    max_new_tokens = sampling.get("max_new_tokens")
    if max_new_tokens is None or max_new_tokens > 1:
        found += [name for name in UNSUPPORTED_FIELDS if is_set(getattr(request, name, None))]
    return found


def _refusal(found: list[str]) -> str:
    told = (
        f"not supported together with --speculative-algorithm ASPIRE: {', '.join(found)}. "
        "Remove the parameter, or send the request to a server without speculation."
    )
    if "sampling_seed" in found:
        told += (
            " On a GPU SGLang draws from seeds only with --enable-deterministic-inference, which "
            "ASPIRE does not support."
        )
    return told


def _check_token_ids(input_ids: list[int] | None, request: Any, vocab_size: int) -> None:
    """Refuse prompts that SGLang accepts and its scheduler does not survive."""
    if getattr(request, "input_embeds", None) is not None:
        return
    if not input_ids:
        raise ValueError("The prompt is empty: it has no token.")
    for token in (min(input_ids), max(input_ids)):
        if not 0 <= token < vocab_size:
            raise ValueError(
                f"The prompt holds the token id {token}; the model has ids 0 to {vocab_size - 1}."
            )


def _check_stop_ids(sampling: dict[str, Any], vocab_size: int) -> None:
    """Refuse stop tokens that do not exist where SGLang's scheduler would index with them."""
    if not sampling.get("min_new_tokens"):
        return
    for token in sampling.get("stop_token_ids") or ():
        if not 0 <= token < vocab_size:
            raise ValueError(
                f"stop_token_ids holds the token id {token}; with min_new_tokens it must be one of "
                f"the model's ids 0 to {vocab_size - 1}."
            )


def _check_top_logprobs(request: Any, vocab_size: int) -> None:
    """Refuse more best tokens than there are, which ends SGLang's scheduler."""
    wanted = getattr(request, "top_logprobs_num", None) or 0
    if not 0 <= wanted <= vocab_size:
        raise ValueError(f"top_logprobs_num must be 0 to {vocab_size}, not {wanted}.")


def _check_listed_ids(request: Any, vocab_size: int) -> None:
    """Refuse ids to report log-probabilities of that do not exist, which ends the scheduler."""
    for token in getattr(request, "token_ids_logprob", None) or ():
        if not 0 <= token < vocab_size:
            raise ValueError(
                f"token_ids_logprob holds the token id {token}; the model has ids 0 to "
                f"{vocab_size - 1}."
            )


def validate_request(
    original: Callable[..., None], manager: Any, request: Any, input_ids: list[int]
) -> None:
    """AROUND ``TokenizerManager._validate_one_request``.

    Raises:
        UnsupportedParameter: naming every parameter that ASPIRE cannot honour.
        ValueError: the prompt is empty or holds a token id that does not exist, or the request's
            own switch for speculation is not valid.
    """
    ours = manager.server_args.attention_backend == "aspire"
    if ours and isinstance(request, GenerateReqInput):
        check_single(request)
    original(manager, request, input_ids)
    preferred = manager.preferred_sampling_params
    sampling = effective_sampling(request, preferred)
    if ours:
        _check_token_ids(input_ids, request, manager.model_config.vocab_size)
        _check_stop_ids(sampling, manager.model_config.vocab_size)
        _check_top_logprobs(request, manager.model_config.vocab_size)
        _check_listed_ids(request, manager.model_config.vocab_size)
        check_seed(sampling.get("sampling_seed"))
        check_processor(getattr(request, "custom_logit_processor", None))
    if not is_aspire(manager.server_args):
        return
    check_custom_params(
        sampling.get("custom_params"),
        has_processor=bool(getattr(request, "custom_logit_processor", None)),
        most=manager.server_args.speculative_num_steps,
    )
    found = unsupported_parameters(request, cpu_platform.is_active(), preferred)
    if found:
        raise UnsupportedParameter(_refusal(found))
