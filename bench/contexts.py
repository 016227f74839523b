"""How well each draft context predicts the model: accept length at a fixed draft length.

``python bench/contexts.py`` serves the model once, with one draft length for all requests, and
switches the draft context between rounds over the same prompts. Greedy, so every context sees the
same text. Accept length is accepted drafts plus one, over the verifies that held all drafts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import yaml
from rich.console import Console
from rich.progress import track
from rich.table import Table

from aspire_sglang.cli.client import (
    aspire_block,
    continue_all,
    draft_rate,
    full_run_lengths,
    reload_config,
)
from aspire_sglang.cli.server import Server, aspire_args, exit_on_signals, plain_args
from aspire_sglang.cli.texts import real_texts
from bench.provenance import provenance
from bench.smollm2 import cache_root, model_path


def contexts(tokens: int) -> dict[str, dict[str, Any]]:
    """Draft contexts of about ``tokens`` tokens in 16-token pages, by name."""
    pages = {"page_size": 16, "min_pages": tokens // 16, "ratio": 1e-6}
    return {
        f"window {tokens}": {**pages, "selection": "window"},
        f"last verify {tokens}": {**pages, "selection": "last_verify"},
        f"refresh {tokens}": {**pages, "selection": "refresh"},
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the study and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--texts", type=int, default=12)
    parser.add_argument(
        "--lengths", type=int, nargs=2, default=(4000, 7500), metavar=("MIN", "MAX")
    )
    parser.add_argument("--gamma", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=144)
    parser.add_argument("--budgets", type=int, nargs="+", default=[512, 256])
    parser.add_argument("--out", type=Path, default=cache_root() / "contexts.json")
    options = parser.parse_args(argv)
    console = Console()
    exit_on_signals()
    model = model_path()
    from transformers import AutoTokenizer

    low, high = options.lengths
    step = (high - low) / max(options.texts - 1, 1)
    lengths = [round(low + i * step) for i in range(options.texts)]
    prompts = real_texts(AutoTokenizer.from_pretrained(model), lengths, seed=2)
    config = cache_root() / "contexts.yaml"
    config.parent.mkdir(parents=True, exist_ok=True)
    config.write_text("")
    room = sum(lengths) + options.texts * (options.new_tokens + 3 * options.gamma + 64)
    args = aspire_args(
        plain_args(model, max_total_tokens=room, max_running_requests=options.texts), config
    )
    results: dict[str, Any] = {}
    with Server(args, log=cache_root() / "logs" / "contexts.log", console=console) as server:
        ids = [list(prompt.input_ids) for prompt in prompts]
        with console.status("prefill"):
            continue_all(server.url, ids, 1, "warm")
        variants = {k: v for tokens in options.budgets for k, v in contexts(tokens).items()}
        for name, context in track(variants.items(), "contexts", console=console):
            settings = {"scheduler": {"policy": "fixed", "gamma": options.gamma}}
            config.write_text(yaml.safe_dump({**settings, "context": context}))
            if not reload_config(server.url):
                raise RuntimeError("the server did not take the configuration; see its log")
            rids = continue_all(server.url, ids, options.new_tokens, name.replace(" ", "-"))
            kept = aspire_block(server.url)["requests"]
            results[name] = _accept_lengths([kept[rid] for rid in rids], options.gamma)
    _show(console, results)
    options.out.write_text(
        json.dumps(
            {
                **provenance(["bench/contexts.py", *(argv or sys.argv[1:])]),
                "prompt_tokens": lengths,
                "gamma": options.gamma,
                "results": results,
            },
            indent=2,
        )
        + "\n"
    )
    console.print(f"result: {options.out}")
    return 0


def _accept_lengths(requests: list[dict[str, Any]], gamma: int) -> dict[str, Any]:
    per_text, full = [], []
    for request in requests:
        lengths = full_run_lengths([request], gamma)
        full += lengths
        per_text.append(statistics.fmean(lengths) if lengths else None)
    return {
        "accept_length": statistics.fmean(full),
        "rate": draft_rate(full, gamma),
        "verifies": len(full),
        "per_text": per_text,
    }


def _show(console: Console, results: dict[str, Any]) -> None:
    table = Table(title="accept length by draft context")
    for title in ("context", "accept length", "rate per token", "over the window", "verifies"):
        table.add_column(title, justify="right")
    for name, result in results.items():
        window = results[f"window {name.rsplit(' ', 1)[1]}"]["accept_length"]
        table.add_row(
            name,
            f"{result['accept_length']:.2f}",
            f"{result['rate']:.3f}",
            f"{result['accept_length'] / window:.2f}x",
            str(result["verifies"]),
        )
    console.print(table)


if __name__ == "__main__":
    raise SystemExit(main())
