"""A model with padded heads computes what the original computes."""

from __future__ import annotations

import json

import pytest
import torch

pytest.importorskip("transformers")

from transformers import LlamaConfig, LlamaForCausalLM

from bench.head_padding import pad_heads


@pytest.fixture
def model(tmp_path):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=9 * 16,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=9,
        num_key_value_heads=3,
        initializer_range=0.2,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def logits(folder, ids):
    loaded = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        return loaded(ids).logits


def test_the_logits_are_the_originals(model, tmp_path):
    padded = pad_heads(model, tmp_path / "padded", ranks=2)
    config = json.loads((padded / "config.json").read_text())
    assert config["num_attention_heads"] == 12
    assert config["num_key_value_heads"] == 4
    assert config["head_dim"] == 16
    ids = torch.randint(97, (2, 40))
    wanted = logits(model, ids)
    found = logits(padded, ids)
    # Zeros are added to the same sums, whose terms may be added in another order.
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    assert wanted.std() > 0.1


def test_added_heads_repeat_the_last_group(model, tmp_path):
    from safetensors.torch import load_file

    padded = pad_heads(model, tmp_path / "padded", ranks=2)
    weights = load_file(padded / "model.safetensors")
    for layer in range(3):
        name = f"model.layers.{layer}.self_attn"
        queries = weights[f"{name}.q_proj.weight"].view(4, 48, -1)
        assert torch.equal(queries[3], queries[2])
        for part in ("k_proj", "v_proj"):
            heads = weights[f"{name}.{part}.weight"].view(4, 16, -1)
            assert torch.equal(heads[3], heads[2])
        assert not weights[f"{name}.o_proj.weight"][:, 9 * 16 :].any()


def test_heads_that_divide_stay(model, tmp_path):
    padded = pad_heads(model, tmp_path / "padded", ranks=3)
    assert json.loads((padded / "config.json").read_text())["num_attention_heads"] == 9


def test_other_models_are_refused(model, tmp_path):
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"model_type": "qwen3"}))
    with pytest.raises(ValueError, match="only Llama models"):
        pad_heads(model, tmp_path / "padded", ranks=2)
