"""The study's loops on a tiny model: what is drafted, verified and recorded."""

import numpy as np
import pytest
import torch

from bench.context_loops import settings_of, summary
from bench.context_run import Loops, Setting
from bench.llama import Llama

VOCAB, HIDDEN, LAYERS, GAMMA = 31, 24, 4, 3


@pytest.fixture(scope="module")
def model() -> Llama:
    generator = torch.Generator().manual_seed(0)

    def weight(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * 3 * columns**-0.5

    weights = {
        "model.embed_tokens.weight": torch.randn(VOCAB, HIDDEN, generator=generator),
        "model.norm.weight": torch.ones(HIDDEN),
    }
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        for name, shape in {
            "self_attn.q_proj": (4 * 8, HIDDEN),
            "self_attn.k_proj": (2 * 8, HIDDEN),
            "self_attn.v_proj": (2 * 8, HIDDEN),
            "self_attn.o_proj": (HIDDEN, 4 * 8),
            "mlp.gate_proj": (40, HIDDEN),
            "mlp.up_proj": (40, HIDDEN),
            "mlp.down_proj": (HIDDEN, 40),
        }.items():
            weights[f"{at}{name}.weight"] = weight(*shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{at}{name}.weight"] = torch.ones(HIDDEN)
    config = {
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "hidden_size": HIDDEN,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": 1e4},
    }
    return Llama(config, weights)


@pytest.fixture(scope="module")
def loops(model) -> Loops:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, VOCAB, length).tolist() for length in (70, 90)]
    with torch.inference_mode():
        return Loops(model, prompts, repeats=1, room=8 * (GAMMA + 1))


def test_the_model_is_the_one_of_transformers(model):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=40,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        tie_word_embeddings=True,
    )
    theirs = transformers.LlamaForCausalLM(config).eval()
    theirs.load_state_dict({**model._weights, "lm_head.weight": model._head})
    tokens = torch.randint(0, VOCAB, (1, 40), generator=torch.Generator().manual_seed(1))

    def attend(layer, q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        attention = torch.nn.functional.scaled_dot_product_attention
        return attention(q, k, v, is_causal=True).transpose(1, 2)

    with torch.inference_mode():
        ours = model.logits(model.forward(tokens, torch.arange(40)[None], attend))
        torch.testing.assert_close(ours, theirs(tokens).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("source", ["hybrid", "refresh", "last_verify_per_layer", "delta"])
def test_a_budget_that_covers_the_context_accepts_everything(loops, source, temperature):
    groups = (1, 2) if source == "delta" else ()
    setting = Setting(source, 1, 400, sink=1, last=4, group_layers=groups)
    with torch.inference_mode():
        accepted = loops.run(setting, GAMMA, temperature, 2, 1).arrays()["accepted"]
    assert accepted.tolist() == [[GAMMA] * 2] * 2


@pytest.mark.parametrize("list_layers", [1, 3])
def test_lists_come_from_the_last_prefill_or_verify(loops, list_layers):
    setting = Setting("hybrid", 1, 12, sink=1, last=3, list_layers=list_layers)
    with torch.inference_mode():
        arrays = loops.run(setting, GAMMA, 0.0, 3, 1).arrays()
    assert arrays["accepted"].shape == (3, 2)


def test_a_small_budget_rejects_and_everything_is_recorded(loops):
    with torch.inference_mode():
        setting = Setting("hybrid", 1, 12, sink=1, last=3)
        arrays = loops.run(setting, GAMMA, 0.0, 6, 1).arrays()
    assert arrays["accepted"].shape == (6, 2)
    assert arrays["accepted"].min() < GAMMA
    for name in ("token_prob", "top_prob", "gap", "entropy", "mass", "overlap"):
        assert arrays[name].shape == (6, 2, GAMMA)
        assert np.isfinite(arrays[name]).all()
    # Greedily a draft's distribution overlaps with the model's all or not at all.
    kept = arrays["overlap"].round().cumprod(axis=2).sum(axis=2)
    assert kept.tolist() == arrays["accepted"].tolist()


def test_settings_are_read_from_their_names():
    found = settings_of(
        [
            "hybrid:8:512:own_share=0.25:last=32",
            "delta:16:256:group_layers=7+14",
            "hybrid:16:512:list_layers=3",
        ]
    )
    first, second, third = found.values()
    assert first == Setting("hybrid", 8, 512, last=32, own_share=0.25)
    assert second == Setting("delta", 16, 256, group_layers=(7, 14))
    assert third == Setting("hybrid", 16, 512, list_layers=3)


def test_accept_lengths_count_the_token_behind_the_drafts():
    accepted = np.array([[3, 0], [1, 2]])
    told = summary(accepted, 3, np.full((2, 2, 3), 0.5))
    assert told["accept_length"] == 2.5
    assert told["per_row"] == [3.0, 2.0]
    assert told["rate"] == 6 / (3 + 1 + 2 + 3)
