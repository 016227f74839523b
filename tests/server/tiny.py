"""A random model that loads in a moment and hardly ever says a token twice.

A lost or doubled token of a text that repeats itself may go unseen; here it cannot. Its texts are
as far from ties as those of a trained model, so greedy texts can be compared token by token.
"""

from __future__ import annotations

import shutil
from pathlib import Path

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def write_tiny_model(folder: Path, tokenizer_of: Path) -> Path:
    """A Llama of three layers with the vocabulary of another model."""
    import torch
    from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    like = AutoConfig.from_pretrained(tokenizer_of)
    config = LlamaConfig(
        vocab_size=like.vocab_size,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        # Tied embeddings or small weights would make it repeat its last token.
        initializer_range=0.2,
        tie_word_embeddings=False,
        bos_token_id=like.bos_token_id,
        eos_token_id=like.eos_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    for name in TOKENIZER_FILES:
        if (tokenizer_of / name).exists():
            shutil.copy(tokenizer_of / name, folder)
    return folder
