"""The engines that GPU measurements start: arguments, ASPIRE settings, environment."""

from __future__ import annotations

import os
from typing import Any

STOCK_SIZES = [1, 2, 4, 8, 16, 32, 64, 128, 192, 256]
# Tiers: these times the most queries of a row, 17 or 16.
ASPIRE_SIZES = [1, 2, 4, 5, 6, 7, 8, 10, 12, 14, 16, 18, 20, 24, 28, 32, 40, 48, 56, 64, 72, 80]
ASPIRE_SIZES += [96, 112, 128, 160, 192, 224, 256]

# Fewer than SGLang's 58, so that engines start sooner; the same for all.
PREFILL_SIZES = [4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 512, 1024, 1536, 2048, 3072, 4096]
PREFILL_SIZES += [6144, 8192]

STOCK: dict[str, Any] = {
    "attention_backend": "fa3",
    "cuda_graph_bs_decode": STOCK_SIZES,
    "cuda_graph_bs_prefill": PREFILL_SIZES,
}
# Stock SGLang has no hooks of ours.
ONLY_PROBE = {"SGLANG_PLUGINS": "zz_aspire_gpu_probe"}
ASPIRE: dict[str, Any] = {
    "attention_backend": "aspire",
    "speculative_algorithm": "ASPIRE",
    "cuda_graph_bs_decode": ASPIRE_SIZES,
    "cuda_graph_bs_prefill": PREFILL_SIZES,
}
# A model's shape alone: no weights, no tokenizer.
LARGE: dict[str, Any] = {
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "max_running_requests": 24,
    "context_length": 32_768,
    "mem_fraction_static": 0.92,
    "decode_log_interval": 8,
}
LARGE_SIZES = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14, 16, 18, 20, 22, 24]
SMALL = {"max_running_requests": 16, "max_total_tokens": 130_000}
CHECKED = {"max_running_requests": 64, "max_total_tokens": 260_000}
CHECK = {"ASPIRE_CHECK_RANKS": "1"}
# What stock wants to be told before it honours some parameters of requests.
ASKED = {"enable_return_hidden_states": True, "enable_custom_logit_processor": True}
FEW_SIZES = [1, 2, 3, 4, 6, 8, 10, 12, 14, 16]
EAGER = {"disable_cuda_graph": True, "disable_overlap_schedule": True}
STAGGERED = "{scheduler: {policy: staggered, gamma: 6}}"
COVERED = "{context: {ratio: 1.0}, scheduler: {policy: staggered, gamma: 6}}"
# Sparse contexts so small that many drafts are rejected.
TINY = "{context: {min_pages: 10, ratio: 0.01}, scheduler: {policy: staggered, gamma: 6}}"


def drafting(context: str, gamma: int = 6) -> str:
    """Settings with a draft context, and drafts of one length, phases spread."""
    return f"{{context: {{{context}}}, scheduler: {{policy: staggered, gamma: {gamma}}}}}"


_LAYERED = {
    "hybrid": "selection: hybrid",
    "hybrid_shared": "selection: hybrid, list_layers: 3, page_size: 8, min_pages: 64",
    "hybrid_covered": "selection: hybrid, list_layers: 3, ratio: 1.0",
    # Two own pages and two shared ones.
    "hybrid_tiny": "selection: hybrid, list_layers: 3, min_pages: 13, ratio: 0.01",
    "per_layer": "selection: last_verify_per_layer",
}
_PAGES_OF_8 = ", page_size: 8, min_pages: 64, last_pages: 16, sink_pages: 2"
# About 512 tokens each, at scenario A's 7,000 tokens; the default policy.
CONTEXTS = {
    "context_refresh_16": "selection: refresh",
    "context_refresh_8": f"selection: refresh{_PAGES_OF_8}",
    "context_window_16": "selection: window",
    "context_last_verify_16": "selection: last_verify",
    "context_per_layer_16": "selection: last_verify_per_layer",
    **{
        f"context_hybrid_{n}_{size}": f"selection: hybrid, list_layers: {n}{rest}"
        for n in (1, 3, 5)
        for size, rest in (
            (16, ""),
            (8, _PAGES_OF_8),
        )
    },
}

# name: engine arguments, ASPIRE configuration, environment. The first is what texts are compared
# with.
VARIANTS: dict[str, tuple[dict[str, Any], str, dict[str, str]]] = {
    "stock": (STOCK, "", ONLY_PROBE),
    "aspire": (ASPIRE, os.environ.get("ASPIRE_BENCH_CONFIG", ""), {}),
    # The refresh layer's own attention reads everything.
    "reads_all": (ASPIRE, "", {"PROBE_READS_ALL": "1"}),
    "eager": ({**ASPIRE, **SMALL, **EAGER}, STAGGERED, {}),
    "graphs": ({**ASPIRE, **SMALL, "disable_overlap_schedule": True}, STAGGERED, {}),
    "overlap": ({**ASPIRE, **SMALL}, STAGGERED, {}),
    "single_steps": ({**ASPIRE, **SMALL}, STAGGERED, {"PROBE_BURST_STEPS": "1"}),
    # In and out of plain decoding at random between drafts in step.
    "phases": (
        {**ASPIRE, **SMALL},
        "{scheduler: {policy: fixed, gamma: 3}}",
        {"PROBE_PHASES": "1"},
    ),
    "covered": ({**ASPIRE, **SMALL}, COVERED, {}),
    "page16": ({**ASPIRE, **SMALL, "page_size": 16}, STAGGERED, {}),
    "page64": (
        {**ASPIRE, **SMALL, "page_size": 64},
        "{context: {page_size: 64}, scheduler: {policy: staggered, gamma: 6}}",
        {},
    ),
    "tiny": ({**ASPIRE, **SMALL}, TINY, {}),
    **{name: ({**ASPIRE, **SMALL}, drafting(context), {}) for name, context in _LAYERED.items()},
    "hybrid_page16": (
        {**ASPIRE, **SMALL, "page_size": 16},
        drafting(_LAYERED["hybrid"]),
        {},
    ),
    "hybrid_eager": ({**ASPIRE, **SMALL, **EAGER}, drafting(_LAYERED["hybrid"]), {}),
    **{name: (ASPIRE, f"{{context: {{{context}}}}}", {}) for name, context in CONTEXTS.items()},
    "broken": ({**ASPIRE, **SMALL}, TINY, {"PROBE_BREAK": "1"}),
    "stock_whole": ({**STOCK, **SMALL}, "", {"PROBE_SPLITS": "1"}),
    "whole": ({**ASPIRE, **SMALL}, STAGGERED, {"PROBE_SPLITS": "1"}),
    # Requests with parameters of their own.
    "parameters": (
        {**ASPIRE, **SMALL, **ASKED, "cuda_graph_bs_decode": FEW_SIZES},
        STAGGERED,
        {},
    ),
    "stock_parameters": (
        {**STOCK, **SMALL, **ASKED, "cuda_graph_bs_decode": FEW_SIZES},
        "",
        ONLY_PROBE,
    ),
    # float16 rounds logits eight times finer than bfloat16: distributions can be told apart.
    "half": ({**ASPIRE, **SMALL, "dtype": "float16"}, STAGGERED, {}),
    "half_tiny": ({**ASPIRE, **SMALL, "dtype": "float16"}, TINY, {}),
    "stock_half": ({**STOCK, **SMALL, "dtype": "float16"}, "", {}),
    # With --tp-size 2: every step is compared, steps drawn at random, and one rank beside two.
    "checked": ({**ASPIRE, **CHECKED}, STAGGERED, CHECK),
    "checked_default": ({**ASPIRE, **CHECKED}, "", CHECK),
    "checked_phases": (
        {**ASPIRE, **CHECKED},
        "{scheduler: {policy: fixed, gamma: 3}}",
        {**CHECK, "PROBE_PHASES": "1"},
    ),
    # SGLang's own kernels for sums over ranks, which are its default.
    "own_sums": ({**ASPIRE, **SMALL, "disable_custom_all_reduce": False}, STAGGERED, {}),
    "one_rank": ({**ASPIRE, **SMALL, "tp_size": 1}, STAGGERED, {}),
    "plain": ({**STOCK, "attention_backend": "aspire"}, "", {}),
    "stock_8b": ({**STOCK, **LARGE, "cuda_graph_bs_decode": [1, 8, 24]}, "", ONLY_PROBE),
    "replay_8b": (
        {**ASPIRE, **LARGE, "cuda_graph_bs_decode": LARGE_SIZES},
        "",
        {"PROBE_REPLAY": "0.9"},
    ),
}

# Settings that a running ASPIRE engine is given in turn.
DEFAULT = ""
STAGGERED_8 = "{scheduler: {policy: staggered, gamma: 8}}"
PLAIN = "{scheduler: {policy: ar}}"
SETTINGS = {
    "default": DEFAULT,
    # As the default, but no two steps, or at most two, are launched at once.
    "single_steps": DEFAULT,
    "pairs": DEFAULT,
    "staggered": STAGGERED_8,
    **{f"staggered {g}": f"{{scheduler: {{policy: staggered, gamma: {g}}}}}" for g in (6, 10, 12)},
    "ar": PLAIN,
}

BURSTS = {"single_steps": 1, "pairs": 2}
"""Most steps that are launched at once with these settings."""


def engine_arguments(tp_size: int, first_gpu: int = 0) -> dict[str, Any]:
    """Arguments of every engine of a run, by the number of GPUs that each of them takes.

    Sums over ranks go through NCCL: SGLang's own kernels for them may use NVLink multicast, which
    not every machine allows. Stock and ASPIRE are compared on the same ground.
    """
    found: dict[str, Any] = {"base_gpu_id": first_gpu}
    if tp_size > 1:
        found |= {"tp_size": tp_size, "disable_custom_all_reduce": True}
    if os.environ.get("PROBE_ONE_GPU"):
        found |= {"disable_cuda_graph": True}
    return found
