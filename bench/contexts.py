"""How well each draft context predicts the model: accept length at a fixed draft length.

``python bench/contexts.py`` serves the model once, with one draft length for all requests, and
switches the draft context between rounds over the same prompts. Greedily every context sees the
same text; at a temperature each draws its own. Accept length is accepted drafts plus one, over the
verifies that held all drafts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
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

SINK, LAST = 16, 128
"""Tokens at the beginning and at the end that every context reads."""

_DELTA = {"refresh_layers": [7, 14, 21], "full_layers": 2}
SELECTIONS: dict[str, dict[str, Any]] = {
    "window": {"selection": "window"},
    "last verify": {"selection": "last_verify"},
    "last verify per layer": {"selection": "last_verify_per_layer"},
    "refresh": {"selection": "refresh"},
    "hybrid": {"selection": "hybrid"},
    "hybrid, 1/4 own": {"selection": "hybrid", "own_share": 0.25},
    "hybrid, 3/4 own": {"selection": "hybrid", "own_share": 0.75},
    "hybrid, a list for 3 layers": {"selection": "hybrid", "list_layers": 3},
    "hybrid, a list for 5 layers": {"selection": "hybrid", "list_layers": 5},
    "delta": {"selection": "delta", **_DELTA},
}
"""Draft contexts by name. Those of ``delta`` read more than the others at equal lists: everything
in five layers, where ``refresh`` and ``hybrid`` do in one."""


def contexts(
    names: Sequence[str], budgets: Sequence[int], page_sizes: Sequence[int]
) -> dict[str, dict[str, Any]]:
    """Draft contexts of about so many tokens in pages of so many, by name."""
    found = {}
    for tokens in budgets:
        for size in page_sizes:
            pages = {
                "page_size": size,
                "min_pages": tokens // size,
                "ratio": 1e-6,
                "sink_pages": max(SINK // size, 1),
                "last_pages": max(LAST // size, 1),
            }
            for name in names:
                if name == "window" and size != page_sizes[0]:
                    continue  # the same tokens
                found[f"{name}, pages of {size}, {tokens}"] = {**pages, **SELECTIONS[name]}
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run the study and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--texts", type=int, default=12)
    parser.add_argument(
        "--lengths", type=int, nargs=2, default=(4000, 7500), metavar=("MIN", "MAX")
    )
    parser.add_argument("--gamma", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=144)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0])
    parser.add_argument("--budgets", type=int, nargs="+", default=[512, 256])
    parser.add_argument("--page-sizes", type=int, nargs="+", default=[16])
    parser.add_argument(
        "--contexts", nargs="+", choices=SELECTIONS, default=["window", "last verify", "refresh"]
    )
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
        variants = contexts(options.contexts, options.budgets, options.page_sizes)
        cells = [(t, name) for t in options.temperatures for name in variants]
        for temperature, name in track(cells, "contexts", console=console):
            settings = {"scheduler": {"policy": "fixed", "gamma": options.gamma}}
            config.write_text(yaml.safe_dump({**settings, "context": variants[name]}))
            if not reload_config(server.url):
                raise RuntimeError("the server did not take the configuration; see its log")
            cell = f"{name}, temperature {temperature}"
            label = cell.replace(" ", "-")
            start = time.perf_counter()
            rids = continue_all(server.url, ids, options.new_tokens, label, temperature=temperature)
            kept = aspire_block(server.url)["requests"]
            results[cell] = {
                "temperature": temperature,
                "context": variants[name],
                **_accept_lengths([kept[rid] for rid in rids], options.gamma),
                "seconds": time.perf_counter() - start,
            }
            # After every one, so that a study that is cut short is not lost.
            options.out.write_text(
                json.dumps(
                    {
                        **provenance(["bench/contexts.py", *(argv or sys.argv[1:])]),
                        "prompt_tokens": lengths,
                        "gamma": options.gamma,
                        "new_tokens": options.new_tokens,
                        "results": results,
                    },
                    indent=2,
                )
                + "\n"
            )
    _show(console, results)
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
        "standard_error": statistics.stdev(full) / len(full) ** 0.5 if len(full) > 1 else None,
        "verifies": len(full),
        "per_text": per_text,
    }


def _show(console: Console, results: dict[str, Any]) -> None:
    table = Table(title="accept length by draft context")
    for title in (
        "context, budget",
        "accept length",
        "rate per token",
        "over the first",
        "verifies",
    ):
        table.add_column(title, justify="right")
    first: dict[float, float] = {}
    for name, result in results.items():
        base = first.setdefault(result["temperature"], result["accept_length"])
        error = result["standard_error"]
        spread = f" +- {error:.2f}" if error is not None else ""
        table.add_row(
            name,
            f"{result['accept_length']:.2f}{spread}",
            f"{result['rate']:.3f}",
            f"{result['accept_length'] / base:.2f}x",
            str(result["verifies"]),
        )
    console.print(table)


if __name__ == "__main__":
    raise SystemExit(main())
