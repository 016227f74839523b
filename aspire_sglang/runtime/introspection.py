"""What users can read about speculation: ``meta_info`` of a response and ``/server_info``."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from sglang.srt.managers.io_struct import SetInternalStateReqOutput

from aspire_sglang import cpu_platform
from aspire_sglang.runtime.arguments import is_aspire
from aspire_sglang.runtime.plain_requests import plain_parameters
from aspire_sglang.runtime.requests import effective_sampling
from aspire_sglang.runtime.switch import draft_limit

logger = logging.getLogger(__name__)

RELOAD_KEY = "aspire_reload_config"


def draft_summary(draft_lengths: list[int]) -> dict[str, Any]:
    """Per-request summary from the histogram of drafts per verify (index = drafts)."""
    return {
        "draft_steps": sum(length * count for length, count in enumerate(draft_lengths)),
        "verify_steps": sum(draft_lengths),
        "draft_lengths": {str(n): count for n, count in enumerate(draft_lengths) if count},
    }


def speculation_of(sampling: dict[str, Any], request: Any, on_cpu: bool) -> tuple[str, str | None]:
    """Whether a request was speculated, and if not, why.

    Args:
        sampling: its sampling parameters.
        request: SGLang's ``GenerateReqInput``.
        on_cpu: whether this package's CPU platform runs the model.
    """
    if draft_limit(sampling.get("custom_params")) == 0:
        return "off by request", "custom_params.aspire allows no drafts"
    names = [] if on_cpu else plain_parameters(sampling.get, request)
    if names:
        return "off by parameter", f"a GPU honours {', '.join(names)} in plain steps only"
    return "on", None


def describe_request(
    original: Callable[..., None],
    manager: Any,
    meta_info: dict[str, Any],
    recv_obj: Any,
    i: int,
) -> None:
    """AROUND ``TokenizerManager._calculate_spec_decoding_metrics``.

    SGLang assumes ``gamma_max`` proposed drafts per verify; here the verified lengths are known
    (SGLang carries them as "cap lens"), so rate and counts use them.
    """
    original(manager, meta_info, recv_obj, i)
    if not is_aspire(manager.server_args):
        return
    histograms = getattr(recv_obj, "spec_cap_lens_histogram", None)
    summary = draft_summary(histograms[i] if histograms else [])
    request = manager.rid_to_state[recv_obj.rids[i]].obj
    sampling = effective_sampling(request, manager.preferred_sampling_params)
    speculation, reason = speculation_of(sampling, request, cpu_platform.is_active())
    meta_info["aspire"] = {
        "speculation": speculation,
        "reason": reason,
        "speculated": summary["draft_steps"] > 0,
        "request_gamma_max": draft_limit(sampling.get("custom_params")),
        **summary,
    }
    if summary["verify_steps"]:
        proposed = summary["draft_steps"]
        correct = meta_info["spec_num_correct_drafts"]
        meta_info["spec_num_proposed_drafts"] = meta_info["spec_proposed_drafts"] = proposed
        meta_info["spec_accept_rate"] = correct / proposed if proposed else 0.0


def describe_server(original: Callable[..., Any], scheduler: Any, recv_req: Any) -> Any:
    """AROUND ``Scheduler.get_internal_state``: add the block ``aspire``."""
    output = original(scheduler, recv_req)
    if is_aspire(scheduler.server_args):
        output.internal_state["aspire"] = scheduler.draft_worker.telemetry.snapshot()
    return output


def reload_config(original: Callable[..., Any], scheduler: Any, recv_req: Any) -> Any:
    """AROUND ``Scheduler.set_internal_state``: ``{"server_args": {"aspire_reload_config": true}}``
    reads the configuration file again; a file that cannot be used changes nothing."""
    if RELOAD_KEY not in recv_req.server_args or not is_aspire(scheduler.server_args):
        return original(scheduler, recv_req)
    others = {key: value for key, value in recv_req.server_args.items() if key != RELOAD_KEY}
    if (wanted := recv_req.server_args[RELOAD_KEY]) != 1:  # True is 1, too
        logger.warning("ASPIRE: %s must be true, not %r", RELOAD_KEY, wanted)
        return SetInternalStateReqOutput(updated=False)
    try:
        scheduler.draft_worker.reload_config()
    except ValueError as fault:
        logger.warning("ASPIRE: configuration not reloaded: %s", fault)
        return SetInternalStateReqOutput(updated=False)
    if others:
        return original(scheduler, type(recv_req)(server_args=others))
    return SetInternalStateReqOutput(updated=True)
