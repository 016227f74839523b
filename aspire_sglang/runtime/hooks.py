"""Every place where ASPIRE changes SGLang's behaviour, in one table, each with its reason.

SGLang only logs a hook that could not be applied, so :func:`verify_hooks` checks at worker start
that each target was really patched.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from aspire_sglang import cpu_platform
from aspire_sglang.cpu_platform import cores, parallel, substitutes, weights
from aspire_sglang.runtime import (
    arguments,
    bodies,
    gpu_graphs,
    grammars,
    introspection,
    logit_rules,
    logprobs,
    parse_errors,
    plain_steps,
    requests,
    reserve,
    results,
    seeds,
)

_SRT = "sglang.srt."
_WRAPPER_FILE = inspect.getsourcefile(HookRegistry)


@dataclass(frozen=True)
class Hook:
    """One change to SGLang: what is hooked, how, by what, and why."""

    target: str
    kind: HookType
    function: Callable[..., Any]
    reason: str
    cpu_only: bool = False
    gpu_only: bool = False


HOOKS = (
    Hook(
        "server_args.ServerArgs.add_cli_args",
        HookType.AROUND,
        arguments.add_cli_args,
        "adds --aspire-config; SGLang has no mechanism for a plugin's own flags",
    ),
    Hook(
        "server_args.ServerArgs.from_cli_args",
        HookType.AROUND,
        arguments.from_cli_args,
        "a missing model, a port in use or too long a context end with one sentence",
    ),
    Hook(
        "entrypoints.http_server.launch_server",
        HookType.AROUND,
        parse_errors.launch_server,
        "some malformed bodies of OpenAI requests would be answered as faults of the server",
    ),
    Hook(
        "mem_cache.kv_cache_builder.get_draft_kv_pool",
        HookType.AROUND,
        arguments.draft_kv_pool,
        "SGLang dereferences the draft model here at start-up; self-speculation has none",
    ),
    Hook(
        "mem_cache.allocation_sizing.get_req_to_token_extra_context_len",
        HookType.AROUND,
        arguments.req_to_token_headroom,
        "a row must hold the decode reserve of 2*(gamma_max+1) slots at the context limit; "
        "SGLang widens it only for page_size > 1, and the writer would spill into the next row",
    ),
    Hook(
        "managers.scheduler_components.batch_result_processor"
        ".SchedulerBatchResultProcessor.process_batch_result_decode",
        HookType.AROUND,
        results.process_verified_rows,
        "rows that only drafted have no result yet: they must not be counted, streamed or "
        "checked for stop conditions",
    ),
    Hook(
        "managers.scheduler_components.batch_result_processor"
        ".SchedulerBatchResultProcessor._resolve_spec_v2_tokens",
        HookType.AROUND,
        results.join_runs,
        "a result of several steps can hold several verifies of a request, which is to be counted "
        "for each and processed once",
        gpu_only=True,
    ),
    Hook(
        "managers.scheduler_components.batch_result_processor"
        ".SchedulerBatchResultProcessor.move_logprobs_to_cpu",
        HookType.AROUND,
        logprobs.move_logprobs,
        "a prefill of requests of which only some list token ids would end the scheduler",
    ),
    Hook(
        "managers.scheduler_components.metrics_reporter"
        ".SchedulerMetricsReporter.report_decode_stats",
        HookType.AROUND,
        results.report_whole_batch,
        "the log line and the running-requests gauge speak of the whole batch, not of the rows "
        "that verified",
    ),
    Hook(
        "managers.schedule_batch.ScheduleBatch.prepare_for_decode",
        HookType.AROUND,
        plain_steps.prepare_for_decode,
        "while nobody drafts, a batch is marked as not speculating and goes through SGLang's own "
        "plain decoding; its slots come from what speculation holds in reserve",
    ),
    Hook(
        "managers.schedule_batch.Req.update_finish_state",
        HookType.AROUND,
        results.finish_at_first_condition,
        "the length cap is asked for first, then strings in the order of the request: an earlier "
        "stop of the same run would be missed",
    ),
    Hook(
        "managers.tokenizer_manager.TokenizerManager._validate_one_request",
        HookType.AROUND,
        requests.validate_request,
        "a parameter that cannot be honoured is refused with a 400 that names it; token ids that "
        "would end the scheduler are refused too",
    ),
    Hook(
        "managers.tokenizer_manager.TokenizerManager.generate_request",
        HookType.AROUND,
        bodies.check_body,
        "wrong types, broken Unicode and huge numbers in a request are server errors or end the "
        "scheduler; they are refused with a 400",
    ),
    Hook(
        "managers.tokenizer_manager.TokenizerManager._calculate_spec_decoding_metrics",
        HookType.AROUND,
        introspection.describe_request,
        "adds meta_info['aspire'] and counts the drafts really proposed, not gamma_max per verify",
    ),
    Hook(
        "managers.scheduler.Scheduler.get_internal_state",
        HookType.AROUND,
        introspection.describe_server,
        "adds the block 'aspire' to /server_info",
    ),
    Hook(
        "managers.scheduler.Scheduler.set_internal_state",
        HookType.AROUND,
        introspection.reload_config,
        "lets a running server take a changed configuration; SGLang accepts a fixed list of keys",
    ),
    Hook(
        "model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner.get_spec_info",
        HookType.AROUND,
        gpu_graphs.capture_input,
        "CUDA graphs of a registered algorithm would be captured without their verify input",
        gpu_only=True,
    ),
    Hook(
        "managers.schedule_batch.ScheduleBatch.cumulate_penalty_output_tokens",
        HookType.AROUND,
        logit_rules.drop_penalizers,
        "SGLang's penalty counters take one token per step and request, whether the step committed "
        "none or several",
        cpu_only=True,
    ),
    Hook(
        "sampling.penaltylib.repetition_penalty.apply_scaling_penalties",
        HookType.REPLACE,
        substitutes.apply_scaling_penalties,
        "a torch.compile function: it needs a C++ compiler, and the first request waits for it",
        cpu_only=True,
    ),
    Hook(
        "constrained.base_grammar_backend.GrammarMask.apply",
        HookType.AROUND,
        grammars.apply_mask,
        "xgrammar's masks are refused on a CPU, and llguidance's need a C++ compiler there",
        cpu_only=True,
    ),
    Hook(
        "constrained.xgrammar_backend._allocate_token_bitmask",
        HookType.REPLACE,
        substitutes.allocate_token_bitmask,
        "SGLang pins the masks' memory, which PyTorch refuses without an accelerator",
        cpu_only=True,
    ),
    Hook(
        "speculative.eagle_utils.eagle_prepare_for_decode",
        HookType.AROUND,
        reserve.reserve_slots,
        "only rows that verified need new KV slots; SGLang handles every row at every step, which "
        "takes longer than a step of drafts on a GPU",
        gpu_only=True,
    ),
    Hook(
        "utils.common.support_triton",
        HookType.REPLACE,
        substitutes.support_triton,
        "the name of the attention backend decides whether Triton kernels run; here none can",
        cpu_only=True,
    ),
    Hook(
        "mem_cache.allocation.assign_req_to_token_pool_func",
        HookType.REPLACE,
        substitutes.assign_req_to_token_pool,
        "a Triton kernel without a CPU version outside SGLang's own CPU engine",
        cpu_only=True,
    ),
    Hook(
        "configs.model_config._get_and_verify_dtype",
        HookType.AROUND,
        substitutes.checkpoint_dtype,
        "--dtype auto may give 16-bit types, which many CPUs compute several times slower",
        cpu_only=True,
    ),
    Hook(
        "managers.tp_worker.TpModelWorker.forward_batch_generation",
        HookType.AROUND,
        seeds.carry_seeds,
        "SGLang hands seeds to its sampler only with deterministic inference",
        cpu_only=True,
    ),
    Hook(
        "layers.sampler.Sampler._sample_from_probs",
        HookType.AROUND,
        seeds.sample_seeded,
        "SGLang ignores seeds otherwise, and its seeded sampler is a Triton kernel; prefill and "
        "plain decoding must draw a seeded token as speculation does",
        cpu_only=True,
    ),
    Hook(
        "utils.numa_utils.init_threads_binding",
        HookType.REPLACE,
        cores.cores_of_rank,
        "SGLang refuses more tensor-parallel ranks than NUMA nodes",
        cpu_only=True,
    ),
    Hook(
        "distributed.bootstrap._init_cpu_threads_env",
        HookType.REPLACE,
        cores.use_cores,
        "threads are shared out with kernels of SGLang's own CPU engine; without them each rank "
        "would run a thread per core of the machine",
        cpu_only=True,
    ),
    Hook(
        "distributed.parallel_state.init_model_parallel_group",
        HookType.AROUND,
        parallel.model_parallel_group,
        "SGLang gives every group of several ranks a communicator for CUDA devices",
        cpu_only=True,
    ),
    Hook(
        "layers.vocab_parallel_embedding.get_masked_input_and_mask",
        HookType.REPLACE,
        parallel.masked_input_and_mask,
        "a torch.compile function: it needs a C++ compiler, and the first request waits for it",
        cpu_only=True,
    ),
    Hook(
        "utils.common.get_available_gpu_memory",
        HookType.AROUND,
        cores.available_memory,
        "each rank would size its KV pool for the whole memory of its NUMA node",
        cpu_only=True,
    ),
    Hook(
        "model_executor.model_runner.ModelRunner.load_model",
        HookType.AFTER,
        weights.pack_loaded_model,
        "PyTorch's plain linear is two to three times slower than one with a packed weight for "
        "the few rows of a decode step",
        cpu_only=True,
    ),
    *(
        Hook(
            f"model_executor.model_runner_components.weight_updater.WeightUpdater.{name}",
            HookType.AFTER,
            weights.repack_updated_model,
            "packed weights are copies and must follow an update of the originals",
            cpu_only=True,
        )
        for name in (
            "update_weights_from_disk",
            "update_weights_from_distributed",
            "update_weights_from_tensor",
            "update_weights_from_ipc",
        )
    ),
)


def _active() -> list[Hook]:
    on_cpu = cpu_platform.is_active()
    return [hook for hook in HOOKS if not (hook.gpu_only if on_cpu else hook.cpu_only)]


def register_hooks() -> None:
    """Hand the hooks to SGLang, which applies them after all plugins have loaded."""
    for hook in _active():
        HookRegistry.register(_SRT + hook.target, hook.function, hook.kind)


def _resolve(target: str) -> Any:
    parts = (_SRT + target).split(".")
    for split in range(len(parts) - 1, 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:split]))
        except ModuleNotFoundError:
            continue
        for name in parts[split:]:
            found = getattr(found, name)
        return found
    raise AttributeError(target)


def verify_hooks() -> None:
    """Check that SGLang applied every hook.

    Raises:
        RuntimeError: naming the targets that are missing or unpatched.
    """
    missing = []
    for hook in _active():
        try:
            found = _resolve(hook.target)
        except AttributeError:
            missing.append(f"{hook.target} (not found)")
            continue
        if inspect.getsourcefile(found.__code__) != _WRAPPER_FILE:
            missing.append(f"{hook.target} (not patched)")
    if missing:
        raise RuntimeError(
            "aspire-sglang could not hook SGLang at: "
            + "; ".join(missing)
            + ". The installed SGLang differs from the supported release; reinstall it."
        )
