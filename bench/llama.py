"""A Llama in plain PyTorch with attention left to the caller, for studies without a server."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""``attend(layer, q [B, n, Hq, D], k [B, n, Hkv, D], v)`` gives ``[B, n, Hq, D]``."""


class Llama:
    """Weights and the forward pass; keys come to ``attend`` with their positions applied.

    Args:
        config: the fields of a Hugging Face ``config.json`` of a Llama without biases.
        weights: tensors by their usual names.
    """

    def __init__(self, config: dict[str, Any], weights: dict[str, Tensor]) -> None:
        self.num_layers: int = config["num_hidden_layers"]
        self.num_heads: int = config["num_attention_heads"]
        self.num_kv_heads: int = config["num_key_value_heads"]
        self.head_dim: int = config.get("head_dim") or config["hidden_size"] // self.num_heads
        self._eps: float = config["rms_norm_eps"]
        self._weights = weights
        self.device = weights["model.embed_tokens.weight"].device
        theta = config["rope_parameters"]["rope_theta"]
        exponents = torch.arange(0, self.head_dim, 2, device=self.device) / self.head_dim
        self._frequencies = 1.0 / theta**exponents
        head = "lm_head.weight"
        self._head = weights[head if head in weights else "model.embed_tokens.weight"]

    @classmethod
    def load(cls, folder: Path, device: str) -> Llama:
        """The model of a folder with ``config.json`` and ``model.safetensors``."""
        from safetensors.torch import load_file

        config = json.loads((folder / "config.json").read_text())
        weights = load_file(folder / "model.safetensors", device=device)
        return cls(config, {name: tensor.float() for name, tensor in weights.items()})

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Final hidden states, normed, ``[B, n, hidden]``.

        Args:
            tokens: ``[B, n]`` int64.
            positions: ``[B, n]`` int64.
            attend: the attention; called once per layer, in order.
        """
        weights = self._weights
        angles = positions[..., None, None] * self._frequencies
        cos, sin = angles.cos(), angles.sin()
        x = weights["model.embed_tokens.weight"][tokens]
        for layer in range(self.num_layers):
            at = f"model.layers.{layer}."
            h = self._norm(x, at + "input_layernorm.weight")
            q, k, v = (
                F.linear(h, weights[f"{at}self_attn.{name}_proj.weight"]).unflatten(
                    -1, (-1, self.head_dim)
                )
                for name in "qkv"
            )
            out = attend(layer, _rotate(q, cos, sin), _rotate(k, cos, sin), v)
            x = x + F.linear(out.flatten(-2), weights[at + "self_attn.o_proj.weight"])
            h = self._norm(x, at + "post_attention_layernorm.weight")
            gate = F.silu(F.linear(h, weights[at + "mlp.gate_proj.weight"]))
            up = F.linear(h, weights[at + "mlp.up_proj.weight"])
            x = x + F.linear(gate * up, weights[at + "mlp.down_proj.weight"])
        return self._norm(x, "model.norm.weight")

    def logits(self, hidden: Tensor) -> Tensor:
        """``[..., vocab]``."""
        return F.linear(hidden, self._head)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self._weights[name], self._eps)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
