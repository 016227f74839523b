"""docs/combinations.md, the table behind it, and the checks of server arguments agree."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import json
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.server_args import ServerArgs

from aspire_sglang.config import ContextConfig, parse_config
from aspire_sglang.runtime.combinations import FLAGS, REQUESTS, Refused, Works
from aspire_sglang.runtime.flag_checks import configuration_faults, flag_faults
from aspire_sglang.runtime.model_limits import MODEL_LIMITS, model_faults
from aspire_sglang.runtime.setting_rules import SETTINGS
from bench.combinations import DENSE, DOCUMENT, GPU_DENSE, document

ROOT = Path(__file__).parents[2]
DEFAULTS = {
    field.name: None if field.default is dataclasses.MISSING else field.default
    for field in dataclasses.fields(ServerArgs)
}


def test_the_document_is_current():
    assert DOCUMENT.read_text() == document(), "run: python bench/combinations.py"


def _named_tests() -> set[str]:
    verdicts = [verdict for row in (*FLAGS, *SETTINGS) for verdict in (row.on_cpu, row.on_gpu)]
    named = {verdict.test for verdict in verdicts if isinstance(verdict, Works)}
    named |= {row.gpu_test for row in REQUESTS if row.gpu_test}
    return named | {row.test for row in REQUESTS} | {DENSE, GPU_DENSE}


@pytest.mark.parametrize("name", sorted(_named_tests()))
def test_named_tests_exist(name):
    path, _, function = name.partition("::")
    body = ast.parse((ROOT / path).read_text()).body
    assert function in {node.name for node in body if isinstance(node, ast.FunctionDef)}


def given(flag: str) -> Any:
    """Some value of the flag that is not its default."""
    default = DEFAULTS[flag]
    if isinstance(default, bool):
        return not default
    return default + 7 if isinstance(default, int | float) else "something"


REFUSED = [
    pytest.param(flag, on_cpu, id=f"{flag}-{'cpu' if on_cpu else 'gpu'}")
    for row in FLAGS
    for on_cpu, verdict in ((True, row.on_cpu), (False, row.on_gpu))
    if isinstance(verdict, Refused)
    for flag in row.flags
]


@pytest.mark.parametrize(("flag", "on_cpu"), REFUSED)
def test_refused_flags_are_named_in_one_sentence(flag, on_cpu):
    args = argparse.Namespace(**{**DEFAULTS, "attention_backend": "aspire", flag: given(flag)})
    (fault,) = flag_faults(args, on_cpu)
    assert fault.startswith("--" + flag.replace("_", "-"))
    assert fault.endswith(".")
    assert "\n" not in fault
    assert fault.count(". ") == 0


@pytest.mark.parametrize("on_cpu", [True, False])
def test_the_defaults_and_allowed_values_pass(on_cpu):
    args = {**DEFAULTS, "attention_backend": "aspire"}
    assert flag_faults(argparse.Namespace(**args), on_cpu) == []
    for row in FLAGS:
        verdict = row.on_cpu if on_cpu else row.on_gpu
        for value in verdict.allowed if isinstance(verdict, Refused) else ():
            assert flag_faults(argparse.Namespace(**{**args, row.flags[0]: value}), on_cpu) == []


def context_faults(selection: str, on_cpu: bool) -> list[str]:
    config = parse_config({"context": {"selection": selection}}, "a test")
    args = argparse.Namespace(**{**DEFAULTS, "device": "cuda"})
    return configuration_faults(args, config, on_cpu)


@pytest.mark.parametrize("row", SETTINGS, ids=lambda row: row.values[0])
@pytest.mark.parametrize("on_cpu", [True, False])
def test_refused_settings_are_named_in_one_sentence(row, on_cpu):
    verdict = row.on_cpu if on_cpu else row.on_gpu
    for value in row.values:
        faults = context_faults(value, on_cpu)
        if isinstance(verdict, Refused):
            assert faults == [f"{row.option} {value}: {verdict.reason}."]
        else:
            assert faults == []


def test_every_draft_context_is_judged():
    listed = [value for row in SETTINGS for value in row.values]
    assert sorted(listed) == sorted(get_args(ContextConfig.model_fields["selection"].annotation))


def test_all_faults_are_reported_at_once():
    args = {**DEFAULTS, "pp_size": 2, "enable_lora": True, "page_size": 16, "is_embedding": True}
    assert len(flag_faults(argparse.Namespace(**args), on_cpu=True)) == 4


CHECKED_AREAS = """
    schedule memory parallel spec disagg lora exec.overlap exec.offload exec.dllm
    exec.deterministic exec.features
"""
# Every argument of these areas must be judged. The others choose models, doors, logs and kernels;
# what of them matters is listed all the same.

# Details of features that are judged as a whole.
DETAILS = """
    hicache_ hisparse_ lora_ disaggregation_ cp_ dcp_ pp_ ep_ elastic_ep_ encoder_ prefill_delayer_
    dllm_ pdmux_ lmcache_ flexkv_ offload_ decoupled_spec_ max_lora enable_lora_ prefill_cp
    dsa_prefill mamba_ swa_
"""
UNRELATED = """
    mem_fraction_static max_running_requests max_queued_requests max_prefill_tokens
    prefill_max_requests disable_overlap_schedule num_continuous_decode_steps

    disable_hybrid_swa_memory disable_chunked_prefix_cache max_mamba_cache_size
    enable_dsa_cache_layer_split enable_cp_decode_attn_tp enable_attn_tp_input_scattered
    enable_dp_attention_local_control_broadcast disable_attn_tp_gather moe_dense_tp_size
    max_ep_size max_loaded_loras experts_shared_outer_loras tbo_token_distribution_threshold
    num_reserved_decode_tokens optimistic_prefill_attempts enable_adaptive_dispatch_to_encoder
    sm_group_num

    nccl_port dist_timeout dist_init_addr node_rank enable_p2p_check

    speculative_algorithm speculative_num_steps speculative_eagle_topk
    speculative_num_draft_tokens speculative_moe_runner_backend speculative_moe_a2a_backend
    speculative_draft_model_quantization

    enable_fp32_lm_head enable_tf32_matmul enable_custom_logit_processor
    disable_outlines_disk_cache
"""
# In this order: how much and when; details of refused models and refused parallelism; how
# processes find each other; ASPIRE's own, and what SGLang itself fills in for any
# speculative algorithm; numbers of the
# model, and what requests may use, which is tested request by request.


def test_no_argument_of_sglang_is_forgotten():
    listed = {flag for row in FLAGS for flag in row.flags} | set(UNRELATED.split())
    assert listed <= DEFAULTS.keys()
    hints = get_type_hints(ServerArgs, include_extras=True)
    areas = {
        name: mark.path
        for name, hint in hints.items()
        for mark in getattr(hint, "__metadata__", ())
        if type(mark).__name__ == "NS"
    }
    assert set(CHECKED_AREAS.split()) <= set(areas.values())
    forgotten = [
        name
        for name in DEFAULTS
        if areas.get(name) in CHECKED_AREAS.split()
        and name not in listed
        and not name.startswith(tuple(DETAILS.split()))
    ]
    assert forgotten == []


LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
}
MODELS = {
    "multi-head latent attention (": {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
    },
    "sliding windows,": {"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2"},
    "linear attention,": {"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next"},
    "encoder-decoder": {
        "architectures": ["WhisperForConditionalGeneration"],
        "model_type": "whisper",
    },
    "multimodal": {
        "architectures": ["Qwen2VLForConditionalGeneration"],
        "model_type": "qwen2_vl",
    },
    "embedding and reward": {"architectures": ["LlamaForSequenceClassification"]},
    "ALiBi": {
        "architectures": ["BaichuanForCausalLM"],
        "model_type": "llama",
        "hidden_size": 512,
    },
    "keys and values": {"head_dim": 64, "v_head_dim": 32},
    "heads of other sizes": {"head_dim": 96},
    "quantized checkpoints": {
        "quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"}
    },
}


def model_config(folder: Path, changes: dict[str, Any]) -> ModelConfig:
    described = changes if "model_type" in changes and changes["model_type"] != "llama" else LLAMA
    (folder / "config.json").write_text(json.dumps({**described, **changes}))
    return ModelConfig(str(folder), enable_multimodal=True)


def test_every_kind_of_model_has_a_case():
    assert len(MODELS) == len(MODEL_LIMITS)
    for limit, case in zip(MODEL_LIMITS, MODELS, strict=True):
        assert limit.feature.startswith(case)


@pytest.mark.parametrize("case", MODELS)
def test_refused_models_are_told_by_their_configuration(case, tmp_path):
    (limit,) = (limit for limit in MODEL_LIMITS if limit.feature.startswith(case))
    config = model_config(tmp_path, MODELS[case])
    for on_cpu, refused in ((True, limit.on_cpu), (False, limit.on_gpu)):
        assert (limit.reason in model_faults(config, on_cpu)) == refused


@pytest.mark.parametrize("on_cpu", [True, False])
def test_dense_decoders_pass(tmp_path, on_cpu):
    assert model_faults(model_config(tmp_path, {}), on_cpu) == []
