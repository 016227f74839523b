"""Every reason why a server cannot start with the given arguments, all of them at once."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from aspire_sglang.config import AspireConfig
from aspire_sglang.runtime.combinations import FLAGS, PREFILL_GRAPHS, Refused
from aspire_sglang.runtime.model_limits import model_faults
from aspire_sglang.runtime.setting_rules import SETTINGS

MAX_STEPS = 64


class BadArguments(ValueError):
    """The server arguments cannot be used.

    Attributes:
        faults: one sentence each.
    """

    def __init__(self, faults: list[str]) -> None:
        super().__init__("ASPIRE: " + " ".join(faults))
        self.faults = faults


def flag_faults(args: Any, on_cpu: bool) -> list[str]:
    """One sentence for each argument that ASPIRE cannot honour.

    Args:
        args: SGLang's ``ServerArgs``, or the namespace of a command line, where fields that SGLang
            resolves later may still be None.
        on_cpu: whether this package's CPU platform runs the model, else a GPU.
    """
    found = []
    for combination in FLAGS:
        verdict = combination.on_cpu if on_cpu else combination.on_gpu
        if not isinstance(verdict, Refused):
            continue
        for name in combination.flags:
            value = getattr(args, name, None)
            if _is_given(name, value) and value not in verdict.allowed:
                found.append(f"{_shown(name, value)}: {verdict.reason}.")
    return found + _backend_faults(args) + _length_faults(args)


def configuration_faults(args: Any, config: AspireConfig, on_cpu: bool) -> list[str]:
    """One sentence for each setting of the file that these arguments do not allow."""
    sparse, page = config.context.page_size, args.page_size or 1
    found = _setting_faults(config, on_cpu)
    if on_cpu:
        return found
    if not str(args.device).startswith("cuda"):
        found.append(f"--device {args.device}: runs on CUDA GPUs and CPUs only.")
    if sparse > 128 or sparse & (sparse - 1):
        found.append(f"context.page_size {sparse}: must be 1, 2, 4, ... 128 on a GPU.")
    if sparse % page:
        found.append(f"--page-size {page}: context.page_size {sparse} must be a multiple of it.")
    return found + _prefill_graph_faults(args)


def _setting_faults(config: AspireConfig, on_cpu: bool) -> list[str]:
    found = []
    for setting in SETTINGS:
        verdict = setting.on_cpu if on_cpu else setting.on_gpu
        value = attrgetter(setting.option)(config)
        if isinstance(verdict, Refused) and value in setting.values:
            found.append(f"{setting.option} {value}: {verdict.reason}.")
    return found


def _prefill_graph_faults(args: Any) -> list[str]:
    # The flag of its own is in the table; a JSON value comes here.
    graphs = getattr(getattr(args, "cuda_graph_config", None), "prefill", None)
    if graphs is None or graphs.backend in PREFILL_GRAPHS:
        return []
    if getattr(args, "cuda_graph_backend_prefill", None) == graphs.backend:
        return []
    names = " or ".join(PREFILL_GRAPHS)
    return [f"--cuda-graph-config: prefill.backend {graphs.backend} must be {names} on a GPU."]


def model_and_layer_faults(model_config: Any, config: AspireConfig, on_cpu: bool) -> list[str]:
    """One sentence for each reason why this model, or this setting with it, cannot be served."""
    name = model_config.model_path
    found = [f"--model-path {name}: {clause}." for clause in model_faults(model_config, on_cpu)]
    layer, layers = config.context.refresh_layer, model_config.num_hidden_layers
    if layer is not None and layer >= layers:
        found.append(f"context.refresh_layer {layer}: the model has layers 0 to {layers - 1}.")
    return found


def _is_given(name: str, value: Any) -> bool:
    from sglang.srt.server_args import ServerArgs

    if value is None or value is False or value in ("", [], {}):
        return False
    return value != ServerArgs.__dataclass_fields__[name].default


def _shown(name: str, value: Any) -> str:
    flag = "--" + name.replace("_", "-")
    return flag if value is True else f"{flag} {value}"


def _backend_faults(args: Any) -> list[str]:
    names = {
        getattr(args, f"{phase}attention_backend", None) for phase in ("", "prefill_", "decode_")
    }
    if names <= {"aspire", None}:
        return []
    return ["needs --attention-backend aspire for prefill and decode."]


def _length_faults(args: Any) -> list[str]:
    found = []
    topk = getattr(args, "speculative_eagle_topk", None)
    steps = getattr(args, "speculative_num_steps", None)
    tokens = getattr(args, "speculative_num_draft_tokens", None)
    if topk not in (None, 1):
        found.append(f"--speculative-eagle-topk {topk}: drafts are chains, use 1.")
    if tokens is not None and (steps is None or tokens != steps + 1):
        found.append(
            "--speculative-num-draft-tokens follows from --speculative-num-steps (steps + 1); "
            "leave it out."
        )
    if steps is not None and not 1 <= steps <= MAX_STEPS:
        found.append(f"--speculative-num-steps {steps}: choose 1 to {MAX_STEPS}.")
    return found
