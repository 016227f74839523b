"""The algorithm ``ASPIRE`` as SGLang's registry sees it, and the server arguments it needs."""

from __future__ import annotations

import logging
import os
from typing import Any

from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_registry import CustomSpecAlgo

from aspire_sglang import cpu_platform
from aspire_sglang.attention.fa3_mixed import small_tile_queries
from aspire_sglang.config import AspireConfig, ConfigError, load_config
from aspire_sglang.runtime.arguments import ALGORITHM
from aspire_sglang.runtime.flag_checks import (
    BadArguments,
    configuration_faults,
    flag_faults,
    model_and_layer_faults,
)

logger = logging.getLogger(__name__)

# Running requests where the user gives no limit. SGLang's own speculative algorithms take 48; on a
# GPU ASPIRE gains most in large batches. Page tables and graphs grow with the number.
MAX_RUNNING_CPU = 48
MAX_RUNNING_GPU = 256


class AspireAlgorithm(CustomSpecAlgo):
    """Supplies what SGLang 0.5.17 calls on an algorithm but its base class lacks."""

    def carries_draft_hidden_states(self) -> bool:
        return False

    def need_topk(self) -> bool:
        return False

    def has_draft_kv(self) -> bool:
        return False

    def supports_ragged_verify(self) -> bool:
        return True

    def supports_grammar_overlap(self) -> bool:
        return False

    def create_future_map(
        self,
        device: Any,
        req_to_token_pool: Any,
        needs_cpu_seq_lens: bool = True,
        needs_confidence_relay: bool = False,
    ) -> Any:
        from aspire_sglang.runtime.future_map import AspireFutureMap

        return AspireFutureMap(
            device, self, req_to_token_pool, needs_cpu_seq_lens, needs_confidence_relay
        )

    def handle_server_args(self, server_args: Any) -> None:
        """Fill in the speculative fields; SGLang has no defaults for a registered algorithm.

        Raises:
            BadArguments: with every flag, setting and property of the model that ASPIRE cannot
                honour, one sentence each.
        """
        on_cpu = cpu_platform.is_active()
        config = _checked_config(server_args, on_cpu)
        changes: dict[str, Any] = {}

        def change(field: str, value: Any) -> None:
            if getattr(server_args, field) != value:
                changes[field] = (getattr(server_args, field), value)
                setattr(server_args, field, value)

        gamma_max = server_args.speculative_num_steps or config.gamma_max
        asked = server_args.speculative_num_steps or "gamma_max" in config.model_fields_set
        if not (on_cpu or asked):
            gamma_max = _fitting_gamma(gamma_max, server_args.get_model_config())
        change("speculative_num_steps", gamma_max)
        change("speculative_eagle_topk", 1)
        change("speculative_num_draft_tokens", gamma_max + 1)
        if server_args.max_running_requests is None:
            change("max_running_requests", MAX_RUNNING_CPU if on_cpu else MAX_RUNNING_GPU)
        if on_cpu:
            change("disable_overlap_schedule", True)
        else:
            _prepare_graphs()
        for field, (old, new) in changes.items():
            logger.info("ASPIRE set --%s %s (was %s)", field.replace("_", "-"), new, old)


def _checked_config(server_args: Any, on_cpu: bool) -> AspireConfig:
    """The configuration, if it and the arguments can be used."""
    try:
        config = load_config()
    except ConfigError as fault:
        raise BadArguments([*fault.faults, *flag_faults(server_args, on_cpu)]) from None
    faults = flag_faults(server_args, on_cpu)
    if server_args.attention_backend is None:
        faults.append("needs --attention-backend aspire for prefill and decode.")
    faults += configuration_faults(server_args, config, on_cpu)
    faults += model_and_layer_faults(server_args.get_model_config(), config, on_cpu)
    if faults:
        raise BadArguments(faults)
    return config


def _fitting_gamma(gamma_max: int, model: Any) -> int:
    """``gamma_max`` that nobody asked for, or less where attention is much faster with less."""
    heads, kv_heads = model.num_attention_heads, model.num_key_value_heads
    queries = small_tile_queries(heads, kv_heads, model.head_dim)
    if queries is None or gamma_max < queries:
        return gamma_max
    logger.info("ASPIRE: %d drafts at most, which fit FlashAttention's small tile", queries - 1)
    return queries - 1


def _prepare_graphs() -> None:
    # SGLang captures graphs for rows of different widths only if asked to by this variable; the
    # processes that capture inherit it.
    os.environ["SGLANG_RAGGED_VERIFY_MODE"] = "compact"


def register_algorithm() -> None:
    """Make ``--speculative-algorithm ASPIRE`` known to this process."""

    # Overlap support is decided per device by disable_overlap_schedule, see handle_server_args;
    # registering without it would only earn a deprecation warning.
    @SpeculativeAlgorithm.register(ALGORITHM, supports_overlap=True, spec_class=AspireAlgorithm)
    def worker_class(server_args: Any) -> type:
        if cpu_platform.is_active():
            from aspire_sglang.runtime.worker import AspireWorker

            return AspireWorker
        from aspire_sglang.runtime.gpu_worker import GpuWorker

        return GpuWorker
