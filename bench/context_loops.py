"""Draft and verify loops in plain PyTorch: what a draft context is worth, without a server.

The lists are those of ``aspire_sglang.context``, chosen and applied as a server does; attention is
dense under a mask, so nothing here says anything about speed. A GPU runs the study in minutes. All
rows draft ``gamma`` tokens, then all verify. Besides accept lengths it records every draft token
with what was known of it, for studies of predictors and of clairvoyant schedules.

    python bench/context_loops.py prompts --out prompts.json          # real texts as tokens
    python bench/context_loops.py run --model DIR --prompts prompts.json --out OUT
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch

from bench.context_run import Loops, Setting
from bench.llama import Llama


def settings_of(names: Sequence[str]) -> dict[str, Setting]:
    """``source:page:tokens[:field=value...]``, parsed."""
    found = {}
    for name in names:
        source, page, tokens, *rest = name.split(":")
        options: dict[str, Any] = {}
        for option in rest:
            key, value = option.split("=")
            if key == "group_layers":
                options[key] = tuple(map(int, value.split("+")))
            else:
                options[key] = float(value) if key == "own_share" else int(value)
        found[name] = Setting(source, int(page), int(tokens), **options)
    return found


def summary(accepted: np.ndarray, gamma: int, overlap: np.ndarray) -> dict[str, Any]:
    """Accept length (accepted drafts plus one) with its standard error over rows."""
    rows = accepted.mean(axis=0) + 1
    lengths = accepted.astype(np.float64).ravel() + 1
    tries = np.minimum(accepted + 1, gamma).sum()
    return {
        "accept_length": float(lengths.mean()),
        "standard_error": float(rows.std(ddof=1) / len(rows) ** 0.5) if len(rows) > 1 else None,
        "rate": float(accepted.sum() / tries),
        "first_draft_overlap": float(overlap[:, :, 0].mean()),
        "verifies": int(lengths.size),
        "per_row": rows.tolist(),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Make prompts, or run settings and write ``OUT.json`` and ``OUT-NUMBER.npz``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("action", choices=("prompts", "run"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--texts", type=int, default=24)
    parser.add_argument("--length", type=int, default=7500)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--gamma", type=int, default=16)
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--settings", nargs="+", default=["refresh:16:512", "hybrid:16:512"])
    parser.add_argument("--keep", nargs="*", default=[], help="settings whose tokens are recorded")
    options = parser.parse_args(argv)
    if options.action == "prompts":
        from transformers import AutoTokenizer

        from aspire_sglang.cli.texts import real_texts
        from bench.smollm2 import model_path

        tokenizer = AutoTokenizer.from_pretrained(model_path())
        texts = real_texts(tokenizer, [options.length] * options.texts, seed=2)
        options.out.write_text(json.dumps([list(text.input_ids) for text in texts]))
        return 0
    torch.backends.cuda.matmul.allow_tf32 = False
    model = Llama.load(options.model, options.device)
    prompts = json.loads(options.prompts.read_text())[: options.texts]
    results: dict[str, Any] = {}
    with torch.inference_mode():
        start = time.perf_counter()
        room = (options.rounds + 1) * (options.gamma + 1)
        loops = Loops(model, prompts, options.repeats, room)
        print(f"prefill {time.perf_counter() - start:.1f} s", flush=True)
        for number, (name, setting) in enumerate(settings_of(options.settings).items()):
            start = time.perf_counter()
            record = loops.run(setting, options.gamma, options.temperature, options.rounds, 1)
            arrays = record.arrays()
            results[name] = summary(arrays["accepted"], options.gamma, arrays["overlap"])
            if name in options.keep:
                path = options.out.with_name(f"{options.out.stem}-{number}.npz")
                np.savez_compressed(path, **arrays)  # type: ignore[arg-type]
            results[name]["seconds"] = time.perf_counter() - start
            print(
                f"{name:44} {results[name]['accept_length']:6.2f} "
                f"+- {results[name]['standard_error'] or 0:.2f}  rate {results[name]['rate']:.3f} "
                f"n {results[name]['verifies']}  {results[name]['seconds']:.1f} s",
                flush=True,
            )
            options.out.write_text(
                json.dumps(
                    {
                        "study": "bench/context_loops.py run",
                        "rounds": options.rounds,
                        "repeats": options.repeats,
                        "device": torch.cuda.get_device_name()
                        if options.device == "cuda"
                        else "cpu",
                        "texts": len(prompts),
                        "prompt_tokens": [len(p) for p in prompts],
                        "temperature": options.temperature,
                        "gamma": options.gamma,
                        "results": results,
                    },
                    indent=2,
                )
                + "\n"
            )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
