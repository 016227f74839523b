"""What ASPIRE works with and what it refuses: one table. Start-up checks server arguments against
it (``flag_checks.py``), and ``docs/combinations.md`` is written from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Works:
    """``test`` would fail if the combination did not work."""

    test: str


@dataclass(frozen=True)
class Refused:
    """The server does not start.

    Attributes:
        reason: one clause for the user.
        allowed: values that pass besides SGLang's default and "not given".
    """

    reason: str
    allowed: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Untested:
    """Neither refused nor proven by a test."""


Verdict = Works | Refused | Untested


@dataclass(frozen=True)
class Combination:
    """One row of the table.

    Attributes:
        area: heading under which the row stands.
        feature: what a user calls it.
        flags: names of SGLang's server arguments that turn it on.
        on_cpu, on_gpu: what happens on either platform.
    """

    area: str
    feature: str
    flags: tuple[str, ...]
    on_cpu: Verdict
    on_gpu: Verdict


class _Area:
    """Rows of one area; flags are given as words of one string."""

    def __init__(self, name: str) -> None:
        self.name = name

    def row(self, feature: str, flags: str, on_cpu: Verdict, on_gpu: Verdict) -> Combination:
        return Combination(self.name, feature, tuple(flags.split()), on_cpu, on_gpu)

    def refused(
        self, feature: str, flags: str, reason: str = "", allowed: tuple[Any, ...] = ()
    ) -> Combination:
        verdict = Refused(reason or f"{feature} is not supported", allowed)
        return self.row(feature, flags, verdict, verdict)

    def works(self, feature: str, flags: str, test: str) -> Combination:
        """Proven on a CPU only."""
        return self.row(feature, flags, Works(test), Untested())


_parallel = _Area("Parallelism")
_memory = _Area("KV cache and memory")
_scheduling = _Area("Scheduling")
_compute = _Area("Kernels and precision")
_serving = _Area("Serving")
_spec = _Area("Other speculative decoding")

_MANY = "tests/server/test_flags.py::test_many_flags_change_no_text"
_REPLICAS = "tests/server/test_flags.py::test_two_replicas"
_GPU_ENGINE = "tests/gpu/test_engine.py::test_steps_ran_as_asked"
_GPU_PREFILL = "tests/gpu/test_prefill.py::test_prefills_ran_as_asked"

PREFILL_GRAPHS = ("breakable", "disabled")
"""SGLang's kinds of CUDA graphs for prefills on a GPU. A prefill votes for the pages of the first
drafts. Breakable graphs, SGLang's default, leave attention out, and with it the vote; others would
record it, or were never run with it."""

FLAGS = (
    _parallel.row(
        "tensor parallelism",
        "tp_size",
        Works("tests/server/test_tensor_parallel.py::test_greedy_texts_are_the_models_own"),
        # tests/gpu/test_tensor_parallel.py has to pass on two of them first.
        Refused("tensor parallelism was never run on several GPUs"),
    ),
    _parallel.refused("pipeline parallelism", "pp_size"),
    _parallel.works("data parallelism (replicas)", "dp_size load_balance_method", _REPLICAS),
    _parallel.refused("DP attention", "enable_dp_attention enable_dp_lm_head"),
    _parallel.refused(
        "context parallelism",
        "dcp_size attn_cp_size enable_prefill_cp enable_prefill_context_parallel "
        "enable_dsa_prefill_context_parallel",
    ),
    _parallel.refused(
        "expert parallelism",
        "ep_size moe_dp_size dwdp_size enable_eplb elastic_ep_backend moe_a2a_backend",
    ),
    _parallel.refused("more than one node", "nnodes"),
    _parallel.refused("PD disaggregation", "disaggregation_mode decoupled_spec_role"),
    _parallel.refused("encoder disaggregation", "encoder_only language_only"),
    _parallel.refused("PD multiplexing", "enable_pdmux"),
    _parallel.refused("overlap of batches", "enable_two_batch_overlap enable_single_batch_overlap"),
    _memory.works(
        "radix cache",
        "",
        "tests/server/test_exactness.py::test_repeated_runs_and_warm_prefix_agree",
    ),
    _memory.works("no radix cache", "disable_radix_cache", _MANY),
    _memory.works("other eviction policies", "radix_eviction_policy", _REPLICAS),
    _memory.refused(
        "another prefix cache",
        "radix_cache_backend enable_lmcache enable_flexkv",
        "only SGLang's own radix cache is supported",
    ),
    _memory.row(
        "page size",
        "page_size",
        Refused("must be 1 on a CPU", (1,)),
        Refused("must be 1 or 16 or 64 on a GPU", (1, 16, 64)),
    ),
    _memory.row(
        "KV cache of another type (fp8, fp4)",
        "kv_cache_dtype",
        Refused("a CPU keeps the KV cache in the model's type; leave it out"),
        Refused("8-bit and 4-bit KV caches are not supported", ("bf16", "bfloat16")),
    ),
    _memory.refused(
        "hierarchical cache (HiCache)",
        "enable_hierarchical_cache hicache_storage_backend",
        "the hierarchical cache is not supported",
    ),
    _memory.refused("HiSparse", "enable_hisparse", "it is another sparse attention"),
    _memory.refused(
        "other KV layouts",
        "enable_page_major_kv_layout enable_unified_memory prefill_only_disable_kv_cache",
        "only SGLang's default KV layout is supported",
    ),
    _memory.refused(
        "offloading weights, memory saver",
        "cpu_offload_gb offload_group_size enable_memory_saver enable_weights_cpu_backup "
        "enable_draft_weights_cpu_backup",
        "weights must stay where they are",
        # Values that mean "off".
        (0, -1),
    ),
    _memory.refused("weight cache", "weight_cache_mode", "the weight cache is not supported"),
    _memory.refused("KV canary", "kv_canary", "the KV canary is not supported"),
    _scheduling.refused(
        "mixed chunk",
        "enable_mixed_chunk",
        "SGLang does not mix prefill chunks into speculative decoding",
    ),
    _scheduling.works(
        "chunked prefill",
        "chunked_prefill_size",
        "tests/server/test_tight_pool.py::test_chunked_prefill",
    ),
    _scheduling.works("prefill in one piece (-1)", "chunked_prefill_size", _MANY),
    _scheduling.works(
        "retraction under memory pressure",
        "max_total_tokens schedule_conservativeness",
        "tests/server/test_tight_pool.py::test_retracted_requests_end_with_the_same_text",
    ),
    _scheduling.works(
        "priorities and preemption",
        "enable_priority_scheduling priority_scheduling_preemption_threshold "
        "disable_priority_preemption schedule_low_priority_values_first default_priority_value "
        "abort_on_priority_when_disabled retraction_policy",
        "tests/server/test_flags.py::test_preempted_requests_end_with_the_same_text",
    ),
    _scheduling.works("schedule policies", "schedule_policy", _REPLICAS),
    _scheduling.works(
        "receiving requests less often",
        "scheduler_recv_interval",
        _MANY,
    ),
    _scheduling.refused(
        "delayed prefill", "enable_prefill_delayer min_free_slots_delay enable_dynamic_chunking"
    ),
    _compute.refused(
        "deterministic inference", "enable_deterministic_inference rl_on_policy_target"
    ),
    _compute.refused("torch.compile", "enable_torch_compile"),
    _compute.row(
        "CUDA graphs of decode steps",
        "cuda_graph_config cuda_graph_backend_decode cuda_graph_max_bs_decode "
        "cuda_graph_bs_decode disable_decode_cuda_graph disable_cuda_graph",
        Untested(),
        Works(_GPU_ENGINE),
    ),
    _compute.row(
        "CUDA graphs of prefills",
        "cuda_graph_max_bs_prefill cuda_graph_bs_prefill disable_prefill_cuda_graph",
        Untested(),
        Works(_GPU_PREFILL),
    ),
    _compute.row(
        "kinds of CUDA graphs of prefills",
        "cuda_graph_backend_prefill",
        Untested(),
        Refused(f"must be {' or '.join(PREFILL_GRAPHS)} on a GPU", PREFILL_GRAPHS),
    ),
    _compute.row(
        "CUDA graphs without padding",
        "disable_cuda_graph_padding",
        Untested(),
        Refused("steps are padded to the captured graphs"),
    ),
    _compute.row(
        "quantized weights",
        "quantization torchao_config quantize_and_serve modelopt_quant",
        Refused("quantized weights need GPU kernels", ("unquant",)),
        Untested(),
    ),
    _compute.row(
        "sampling backend",
        "sampling_backend",
        Refused("a CPU samples with PyTorch; leave it out", ("pytorch",)),
        Untested(),
    ),
    _compute.row("bfloat16", "dtype", Works(_REPLICAS), Works(_GPU_ENGINE)),
    _compute.refused(
        "models through Transformers", "model_impl", "needs SGLang's own model code", ("sglang",)
    ),
    _compute.refused("KTransformers", "kt_weight_path"),
    _serving.refused("LoRA", "enable_lora lora_paths"),
    _serving.refused("embedding models", "is_embedding", "an embedding model does not decode"),
    _serving.refused(
        "diffusion language models",
        "dllm_algorithm",
        "diffusion language models are not supported",
    ),
    _serving.refused(
        "sessions",
        "enable_streaming_session enable_session_radix_cache",
        "sessions are not supported",
    ),
    _serving.refused(
        "several tokenizer workers",
        "tokenizer_worker_num",
        "tokenizer workers do not load plugins in this SGLang",
    ),
    _serving.refused(
        "gRPC, Ray",
        "smg_grpc_mode grpc_mode grpc_port use_ray",
        "only the HTTP server and Engine load plugins in this SGLang",
    ),
    _serving.works("batched tokenization", "enable_tokenizer_batch_encode", _MANY),
    _serving.works("stream intervals", "stream_interval incremental_streaming_output", _MANY),
    _serving.works(
        "grammar backend xgrammar",
        "grammar_backend",
        "tests/server/test_grammar.py::"
        "test_structured_texts_are_plain_decodings_in_one_batch_with_others",
    ),
    _serving.works("grammar backend llguidance", "grammar_backend", _MANY),
    _serving.works(
        "grammar backend outlines (its requests decode plainly)", "grammar_backend", _REPLICAS
    ),
    _serving.row(
        "hidden states",
        "enable_return_hidden_states return_hidden_states_mode",
        Works("tests/server/test_logprobs.py::test_hidden_states_equal_plain_decodings"),
        Works("tests/gpu/test_parameters.py::test_hidden_states_are_those_of_stock"),
    ),
    _serving.refused(
        "routed experts, indexer top-k",
        "enable_return_routed_experts enable_return_indexer_topk",
        "the lists would hold rows of drafts",
    ),
    _serving.refused("multi-item scoring", "enable_mis"),
    _spec.refused(
        "a draft model",
        "speculative_draft_model_path speculative_draft_model_revision "
        "speculative_draft_load_format speculative_draft_attention_backend speculative_token_map",
        "self-speculation has no draft model",
    ),
    _spec.refused(
        "SGLang's adaptive lengths",
        "speculative_adaptive speculative_adaptive_config",
        "ASPIRE chooses draft lengths itself",
    ),
    _spec.refused(
        "acceptance with losses",
        "speculative_accept_threshold_single speculative_accept_threshold_acc",
        "ASPIRE accepts without loss only",
    ),
    _spec.refused(
        "settings of other algorithms",
        "speculative_dflash_block_size speculative_dspark_block_size "
        "speculative_dspark_sps_table_path speculative_dspark_confidence_sts_path "
        "speculative_dspark_align_verify_tokens_to_graph_tier speculative_use_rejection_sampling "
        "speculative_attention_mode speculative_draft_window_size speculative_skip_dp_mlp_sync "
        "enable_multi_layer_eagle spec_trace_dir speculative_ngram_min_bfs_breadth "
        "speculative_ngram_max_bfs_breadth speculative_ngram_match_type "
        "speculative_ngram_max_trie_depth speculative_ngram_capacity "
        "speculative_ngram_external_corpus_path speculative_ngram_external_sam_budget "
        "speculative_ngram_external_corpus_max_tokens",
        "it belongs to another speculative algorithm",
    ),
)


@dataclass(frozen=True)
class RequestFeature:
    """Parameters of a request that a CPU honours, and the test that proves it.

    Attributes:
        gpu_test: proves the same of a GPU. Whether it takes plain steps there is told by
            :mod:`aspire_sglang.runtime.plain_requests`.
    """

    feature: str
    names: tuple[str, ...]
    test: str
    gpu_test: str | None = None


def _request(feature: str, names: str, test: str, gpu_test: str | None = None) -> RequestFeature:
    on_gpu = gpu_test and f"tests/gpu/test_{gpu_test}"
    return RequestFeature(feature, tuple(names.split()), f"tests/server/test_{test}", on_gpu)


REQUESTS = (
    _request(
        "temperature, top-k, top-p, min-p",
        "temperature top_k top_p min_p",
        "sampling.py::test_second_and_third_token",
        "engine.py::test_samples_follow_the_target",
    ),
    _request(
        "penalties and bias",
        "frequency_penalty presence_penalty repetition_penalty logit_bias",
        "penalties.py::test_penalised_texts_are_plain_decodings_in_one_batch_with_others",
        "parameters.py::test_texts_are_those_of_stock",
    ),
    _request(
        "least length",
        "min_new_tokens",
        "penalties.py::test_min_new_tokens_counts_tokens",
        "parameters.py::test_texts_are_those_of_stock",
    ),
    _request("seeds", "sampling_seed", "seeds.py::test_batch_of_seeds_equals_plain_decoding"),
    _request(
        "structured output",
        "json_schema regex ebnf structural_tag",
        "grammar.py::test_structured_texts_are_plain_decodings_in_one_batch_with_others",
        "parameters.py::test_texts_are_those_of_stock",
    ),
    _request(
        "custom logit processors",
        "custom_logit_processor",
        "penalties.py::test_penalised_texts_are_plain_decodings_in_one_batch_with_others",
        "parameters.py::test_texts_are_those_of_stock",
    ),
    _request(
        "log-probabilities",
        "return_logprob logprob_start_len top_logprobs_num token_ids_logprob",
        "logprobs.py::test_decode_equals_rescore_in_a_mixed_batch",
        "parameters.py::test_logprobs_are_those_of_stock",
    ),
    _request(
        "hidden states",
        "return_hidden_states",
        "logprobs.py::test_hidden_states_equal_plain_decodings",
        "parameters.py::test_hidden_states_are_those_of_stock",
    ),
    _request("copies", "n", "lifecycle.py::test_copies_in_a_batch"),
    _request("stop conditions", "stop stop_regex stop_token_ids", "stopping.py::test_stop_string"),
    _request("streaming", "stream", "streaming.py::test_native_stream_equals_whole_answer"),
    _request(
        "a request's own switch",
        "custom_params.aspire",
        "switch.py::test_each_request_of_a_batch_has_its_own_switch",
    ),
)
