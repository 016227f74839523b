"""The same model with more attention heads, so that two ranks can share them out.

``python bench/head_padding.py --model MODEL --out DIR`` writes a copy of a Llama model whose KV
heads are a multiple of ``--ranks``. The heads that are added repeat the last KV head with its query
heads, and what they find is multiplied by zero: the copy computes the same function, and by the
greatest vote of any head it chooses the same pages. It costs the time of the added heads.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

WEIGHTS = "model.safetensors"


def pad_heads(model: Path, out: Path, ranks: int) -> Path:
    """Write the copy to ``out``.

    Args:
        model: folder of a Llama model in one safetensors file.
        ranks: what the KV heads of the copy are a multiple of.

    Raises:
        ValueError: for another architecture, or projections with biases.
    """
    config = json.loads((model / "config.json").read_text())
    if config["model_type"] != "llama" or config.get("attention_bias"):
        raise ValueError(f"{model}: only Llama models without attention biases can be padded")
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    dim = config.get("head_dim") or config["hidden_size"] // heads
    more = -kv_heads % ranks
    group = heads // kv_heads
    out.mkdir(parents=True, exist_ok=True)
    for file in model.iterdir():
        if file.is_file() and file.name != WEIGHTS:
            shutil.copy(file, out)
    config |= {
        "num_attention_heads": heads + more * group,
        "num_key_value_heads": kv_heads + more,
        "head_dim": dim,
    }
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    weights = load_file(model / WEIGHTS)
    for name, weight in weights.items():
        if name.endswith("q_proj.weight"):
            weights[name] = _repeat_last(weight, group * dim, more)
        elif name.endswith(("k_proj.weight", "v_proj.weight")):
            weights[name] = _repeat_last(weight, dim, more)
        elif name.endswith("o_proj.weight"):
            nothing = weight.new_zeros(weight.shape[0], more * group * dim)
            weights[name] = torch.cat([weight, nothing], dim=1)
    save_file(weights, out / WEIGHTS, metadata={"format": "pt"})
    return out


def _repeat_last(weight: Tensor, rows: int, times: int) -> Tensor:
    return torch.cat([weight, *[weight[-rows:]] * times])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    print(pad_heads(options.model, options.out, options.ranks))
    return 0


if __name__ == "__main__":
    sys.exit(main())
