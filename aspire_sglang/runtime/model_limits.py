"""Models that ASPIRE's attention cannot serve, told by their configuration before weights load."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ModelLimit:
    """One kind of model that is refused.

    Attributes:
        feature: what a user calls it.
        applies: whether SGLang's ``ModelConfig`` describes such a model.
        reason: one clause for the user.
        on_cpu, on_gpu: where it is refused.
    """

    feature: str
    applies: Callable[[Any], bool]
    reason: str
    on_cpu: bool = True
    on_gpu: bool = True


def _is_windowed(config: Any) -> bool:
    layers = getattr(config.hf_text_config, "layer_types", None) or ()
    return (
        config.is_hybrid_swa
        or config.attention_chunk_size is not None
        or "sliding_attention" in layers
    )


def _has_linear_layers(config: Any) -> bool:
    from sglang.srt.configs.hybrid_arch import mambaish_config

    return mambaish_config(config) is not None


def _is_multimodal(config: Any) -> bool:
    return bool(config.is_multimodal or config.model_is_mrope)


MODEL_LIMITS = (
    ModelLimit(
        "multi-head latent attention (DeepSeek V2/V3, Kimi K2)",
        lambda config: config.attention_arch.name == "MLA",
        "multi-head latent attention is not supported",
    ),
    ModelLimit(
        "sliding windows, chunked attention (Gemma 2 and 3, gpt-oss, Llama 4)",
        _is_windowed,
        "sliding-window models are not supported",
    ),
    ModelLimit(
        "linear attention, Mamba (Qwen3-Next, Falcon-H1, Nemotron-H)",
        _has_linear_layers,
        "linear attention and state-space layers are not supported",
    ),
    ModelLimit(
        "encoder-decoder models (Whisper, Mllama)",
        lambda config: config.is_encoder_decoder,
        "encoder-decoder models are not supported",
    ),
    ModelLimit(
        "multimodal models (Qwen2-VL, LLaVA)",
        _is_multimodal,
        "multimodal models are not supported",
    ),
    ModelLimit(
        "embedding and reward models",
        lambda config: not config.is_generation,
        "the model does not generate text",
    ),
    ModelLimit(
        "ALiBi positions (Baichuan 13B)",
        lambda config: bool(getattr(config, "use_alibi", False)),
        "ALiBi positions are not supported",
    ),
    ModelLimit(
        "keys and values of different size",
        lambda config: config.v_head_dim != config.head_dim,
        "keys and values must have the same size",
    ),
    ModelLimit(
        "heads of other sizes than 64, 128 and 256",
        lambda config: config.head_dim not in (64, 128, 256),
        "heads must have 64, 128 or 256 dimensions on a GPU",
        on_cpu=False,
    ),
    ModelLimit(
        "quantized checkpoints",
        lambda config: config.quantization is not None,
        "quantized weights need GPU kernels",
        on_gpu=False,
    ),
)


def model_faults(config: Any, on_cpu: bool) -> list[str]:
    """One clause for each reason why this model cannot be served.

    Args:
        config: SGLang's ``ModelConfig``.
        on_cpu: whether this package's CPU platform runs the model, else a GPU.
    """
    # A clause may be given by two rows, and is told once.
    clauses = dict.fromkeys(
        limit.reason
        for limit in MODEL_LIMITS
        if (limit.on_cpu if on_cpu else limit.on_gpu) and limit.applies(config)
    )
    return list(clauses)
