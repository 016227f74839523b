"""A random Llama that any machine can split: 8 query heads, 4 KV heads, no tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

VOCAB = 512
CONTEXT = 2048


def save(folder: Path) -> Path:
    """Write the model; the same weights each time."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=CONTEXT,
        initializer_range=0.1,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.model.embed_tokens.weight.normal_(0.0, 1.0)
        model.lm_head.weight.normal_(0.0, 0.4)
        for layer in model.model.layers:
            # Sharp attention of little weight: a draft that reads less is right about every other
            # time. In a model that is merely random it never is.
            layer.self_attn.q_proj.weight.mul_(4.0)
            layer.self_attn.o_proj.weight.mul_(0.1)
    model.save_pretrained(folder)
    return folder


def load(folder: Path) -> Any:
    """The model in PyTorch, float32: the judge of greedy texts."""
    import torch
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def gaps(model: Any, prompt: list[int], output: list[int]) -> list[float]:
    """Per output token: log-probability of the best token at its place minus its own."""
    import torch

    with torch.inference_mode():
        ids = torch.tensor([prompt + output])
        scores = model(ids).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
    own = scores.gather(1, torch.tensor(output)[:, None]).squeeze(1)
    return (scores.amax(-1) - own).tolist()
