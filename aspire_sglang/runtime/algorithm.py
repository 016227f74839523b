"""The algorithm ``ASPIRE`` as SGLang's registry sees it, and the server arguments it needs."""

from __future__ import annotations

import logging
import os
from typing import Any

from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_registry import CustomSpecAlgo

from aspire_sglang import cpu_platform
from aspire_sglang.config import ConfigError, load_config
from aspire_sglang.runtime.arguments import ALGORITHM

logger = logging.getLogger(__name__)

# Running requests where the user gives no limit. SGLang's own speculative algorithms take 48; on a
# GPU ASPIRE gains most in large batches. Page tables and graphs grow with the number.
MAX_RUNNING_CPU = 48
MAX_RUNNING_GPU = 256

# Flags that ASPIRE cannot work with yet: field, value that means "off", what the user reads.
_REFUSED_FLAGS = (
    ("speculative_draft_model_path", None, "self-speculation has no draft model"),
    ("pp_size", 1, "pipeline parallelism is not supported"),
    ("enable_lora", None, "LoRA is not supported"),
    ("enable_dp_attention", False, "DP attention is not supported"),
    ("dcp_size", 1, "decode context parallelism is not supported"),
    ("attn_cp_size", 1, "attention context parallelism is not supported"),
    ("enable_two_batch_overlap", False, "two-batch overlap is not supported"),
    ("enable_single_batch_overlap", False, "single-batch overlap is not supported"),
    ("enable_pdmux", False, "PD multiplexing is not supported"),
    ("enable_multi_layer_eagle", False, "it belongs to another speculative algorithm"),
    ("enable_mixed_chunk", False, "SGLang does not mix prefill chunks into speculative decoding"),
    ("enable_hierarchical_cache", False, "the hierarchical cache is not supported"),
    ("enable_deterministic_inference", False, "deterministic inference is not supported"),
    ("disaggregation_mode", "null", "PD disaggregation is not supported"),
    ("tokenizer_worker_num", 1, "tokenizer workers do not load plugins in this SGLang"),
    ("speculative_adaptive", False, "ASPIRE chooses draft lengths itself"),
)

_REFUSED_GPU_FLAGS = (
    ("tp_size", 1, "tensor parallelism is supported on CPUs only"),
    ("enable_return_hidden_states", False, "hidden states are not supported on GPUs"),
    ("enable_torch_compile", False, "torch.compile is not supported"),
    ("disable_cuda_graph_padding", False, "steps are padded to the captured graphs"),
)


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
        from sglang.srt.managers.overlap_utils import FutureMap

        return FutureMap(
            device, self, req_to_token_pool, needs_cpu_seq_lens, needs_confidence_relay
        )

    def handle_server_args(self, server_args: Any) -> None:
        """Fill in the speculative fields; SGLang has no defaults for a registered algorithm.

        Raises:
            ValueError: for a flag ASPIRE cannot honour, with one sentence.
        """
        try:
            config = load_config()
        except ConfigError as fault:
            raise ValueError(f"ASPIRE: {fault}") from None
        _refuse_unsupported(server_args)
        changes: dict[str, Any] = {}
        on_cpu = cpu_platform.is_active()

        def change(field: str, value: Any) -> None:
            if getattr(server_args, field) != value:
                changes[field] = (getattr(server_args, field), value)
                setattr(server_args, field, value)

        gamma_max = server_args.speculative_num_steps or config.gamma_max
        change("speculative_num_steps", gamma_max)
        change("speculative_eagle_topk", 1)
        change("speculative_num_draft_tokens", gamma_max + 1)
        if server_args.max_running_requests is None:
            change("max_running_requests", MAX_RUNNING_CPU if on_cpu else MAX_RUNNING_GPU)
        if on_cpu:
            change("disable_overlap_schedule", True)
        else:
            _prepare_graphs(server_args)
        for field, (old, new) in changes.items():
            logger.info("ASPIRE set --%s %s (was %s)", field.replace("_", "-"), new, old)


def _refuse_flags(server_args: Any, table: tuple[tuple[str, Any, str], ...]) -> None:
    for field, off, reason in table:
        value = getattr(server_args, field, off)
        if value not in (off, None, False):
            raise ValueError(f"ASPIRE: --{field.replace('_', '-')} {value}: {reason}.")


def _refuse_unsupported(server_args: Any) -> None:
    _refuse_flags(server_args, _REFUSED_FLAGS)
    on_cpu = cpu_platform.is_active()
    if not on_cpu:
        _refuse_unsupported_on_gpu(server_args)
    backends = {
        server_args.attention_backend,
        server_args.prefill_attention_backend or server_args.attention_backend,
        server_args.decode_attention_backend or server_args.attention_backend,
    }
    if backends != {"aspire"}:
        raise ValueError("ASPIRE: needs --attention-backend aspire for prefill and decode.")
    pages = (1,) if on_cpu else (1, 16, 64)
    if server_args.page_size not in (None, *pages):
        known = f"{' or '.join(map(str, pages))} on a {'CPU' if on_cpu else 'GPU'}"
        raise ValueError(f"ASPIRE: --page-size {server_args.page_size}: must be {known}.")
    topk = server_args.speculative_eagle_topk
    if topk not in (None, 1):
        raise ValueError(f"ASPIRE: --speculative-eagle-topk {topk}: drafts are chains, use 1.")
    steps, tokens = server_args.speculative_num_steps, server_args.speculative_num_draft_tokens
    if tokens is not None and (steps is None or tokens != steps + 1):
        raise ValueError(
            "ASPIRE: --speculative-num-draft-tokens follows from --speculative-num-steps "
            "(steps + 1); leave it out."
        )
    if steps is not None and not 1 <= steps <= 64:
        raise ValueError(f"ASPIRE: --speculative-num-steps {steps}: choose 1 to 64.")


def _refuse_unsupported_on_gpu(server_args: Any) -> None:
    if not str(server_args.device).startswith("cuda"):
        raise ValueError(f"ASPIRE: --device {server_args.device}: runs on CUDA GPUs and CPUs only.")
    _refuse_flags(server_args, _REFUSED_GPU_FLAGS)
    sparse = load_config().context.page_size
    if sparse > 128 or sparse & (sparse - 1):
        raise ValueError(f"ASPIRE: context.page_size {sparse}: must be 1, 2, 4, ... 128 on a GPU.")
    if sparse % (server_args.page_size or 1):
        raise ValueError(
            f"ASPIRE: --page-size {server_args.page_size}: context.page_size {sparse} must be a "
            "multiple of it."
        )


def _prepare_graphs(server_args: Any) -> None:
    # SGLang captures graphs for rows of different widths only if asked to by this variable; the
    # processes that capture inherit it.
    os.environ["SGLANG_RAGGED_VERIFY_MODE"] = "compact"
    # A prefill votes for the pages of the first drafts, which its graph would not record.
    server_args.cuda_graph_config.prefill.backend = "disabled"
    logger.info("ASPIRE disabled CUDA graphs for prefill")


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
