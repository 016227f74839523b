"""Turn a Llama-architecture GGUF file into a directory that transformers and SGLang load.

The weights are dequantized once, so that every server reads the same float32 values. This is done
with the ``gguf`` package alone: transformers' own GGUF loading wants ``accelerate``, and its
tokenizer conversion picks the wrong end-of-text token and the wrong digit splitting for SmolLM2.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, dequantize
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, PreTrainedTokenizerFast

# GGUF's token_type value for control tokens such as <|im_end|>.
CONTROL_TOKEN = 3

OUTSIDE_BLOCKS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
INSIDE_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert(gguf_file: Path, out: Path) -> None:
    """Write ``config.json``, weights, generation config and tokenizer into ``out``."""
    reader = GGUFReader(str(gguf_file))
    meta = {
        name: field.contents()
        for name, field in reader.fields.items()
        if not name.startswith("GGUF.")
    }
    if meta["general.architecture"] != "llama":
        raise ValueError(
            f"{gguf_file.name} holds a {meta['general.architecture']} model, not llama"
        )

    weights = _weights(reader, meta)
    tied = "lm_head.weight" not in weights
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    _config(meta, tied).save_pretrained(out)
    GenerationConfig(**_special_ids(meta)).save_pretrained(out)
    _tokenizer(meta).save_pretrained(out)


def _weights(reader: GGUFReader, meta: dict[str, Any]) -> dict[str, torch.Tensor]:
    heads = {
        "attn_q": meta["llama.attention.head_count"],
        "attn_k": meta["llama.attention.head_count_kv"],
    }
    weights = {}
    for tensor in reader.tensors:
        array = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        if tensor.name in OUTSIDE_BLOCKS:
            name = OUTSIDE_BLOCKS[tensor.name]
        else:
            _, layer, part, _ = tensor.name.split(".")
            name = f"model.layers.{layer}.{INSIDE_BLOCK[part]}.weight"
            if part in heads:
                array = _neox_rope_order(array, heads[part])
        # A copy: arrays stored as float32 are read-only views of the mapped file.
        weights[name] = torch.from_numpy(np.array(array, order="C"))
    return weights


def _neox_rope_order(array: np.ndarray, heads: int) -> np.ndarray:
    """Undo llama.cpp's row order, which puts the two halves of each rotary pair side by side."""
    half = array.shape[0] // heads // 2
    return array.reshape(heads, half, 2, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)


def _special_ids(meta: dict[str, Any]) -> dict[str, int]:
    return {
        "bos_token_id": meta["tokenizer.ggml.bos_token_id"],
        "eos_token_id": meta["tokenizer.ggml.eos_token_id"],
        "pad_token_id": meta["tokenizer.ggml.padding_token_id"],
    }


def _config(meta: dict[str, Any], tied: bool) -> LlamaConfig:
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=len(meta["tokenizer.ggml.tokens"]),
        hidden_size=meta["llama.embedding_length"],
        intermediate_size=meta["llama.feed_forward_length"],
        num_hidden_layers=meta["llama.block_count"],
        num_attention_heads=meta["llama.attention.head_count"],
        num_key_value_heads=meta["llama.attention.head_count_kv"],
        head_dim=meta["llama.rope.dimension_count"],
        max_position_embeddings=meta["llama.context_length"],
        rms_norm_eps=float(f"{meta['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        rope_parameters={"rope_type": "default", "rope_theta": meta["llama.rope.freq_base"]},
        tie_word_embeddings=tied,
        dtype="float32",
        **_special_ids(meta),
    )


def _tokenizer(meta: dict[str, Any]) -> PreTrainedTokenizerFast:
    """Rebuild the byte-level BPE tokenizer; "smollm" splits every digit off, then as GPT-2 does."""
    if (meta["tokenizer.ggml.model"], meta["tokenizer.ggml.pre"]) != ("gpt2", "smollm"):
        raise ValueError("only the 'smollm' flavour of the gpt2 tokenizer is known here")
    tokens: list[str] = meta["tokenizer.ggml.tokens"]
    merges = [tuple(pair.split(" ", 1)) for pair in meta["tokenizer.ggml.merges"]]
    core = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    core.decoder = decoders.ByteLevel()
    kinds = meta["tokenizer.ggml.token_type"]
    core.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind == CONTROL_TOKEN
        ]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=tokens[meta["tokenizer.ggml.bos_token_id"]],
        eos_token=tokens[meta["tokenizer.ggml.eos_token_id"]],
        pad_token=tokens[meta["tokenizer.ggml.padding_token_id"]],
        unk_token=tokens[meta["tokenizer.ggml.unknown_token_id"]],
        model_max_length=meta["llama.context_length"],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = meta["tokenizer.chat_template"]
    return tokenizer
