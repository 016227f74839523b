"""What each idea is worth: published schedules and ours, on one server and the same prompts.

``python bench/ablation.py`` serves the model once and changes the schedule and the draft context
between rounds. Contexts and kinds of text are mixed, as a length per request can only win where
requests differ. Every fixed length is tried, and its best one quoted. Writes JSON and a plot.
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

from aspire_sglang.cli.client import aspire_block, reload_config
from aspire_sglang.cli.server import Server, aspire_args, exit_on_signals, plain_args
from aspire_sglang.cli.texts import real_texts
from bench.answer import decode_speed
from bench.provenance import provenance
from bench.rounds import Request, run_round
from bench.smollm2 import cache_root, model_path

LENGTHS = (600, 1500, 2500, 3500, 4500, 5500, 6500, 7200)
"""Prompt tokens of the requests; continuation, code, copying and chat in turn."""

_COST_RATIOS = (0.1, 0.2, 0.4)

_FIXED = {
    "window, in step (MagicDec)": ("window", "fixed"),
    "last verify, in step (SparseSpec, Vegas with one list)": ("last_verify", "fixed"),
    "refresh, in step": ("refresh", "fixed"),
    "last verify, staggered (SparseSpec unified, one list)": ("last_verify", "staggered"),
    "refresh, staggered": ("refresh", "staggered"),
}
_HYBRID = {
    "selection": "hybrid",
    "page_size": 8,
    "min_pages": 64,
    "sink_pages": 2,
    "last_pages": 16,
}
"""The budget of the defaults in pages of half the size."""

_ADAPTIVE = {
    "refresh, one length for all": {"policy": "global"},
    "refresh, the paper's rule": {"policy": "aspire", "confidence": False},
    "refresh, shadow price": {"policy": "shadow_price", "confidence": False},
    "refresh, the paper's rule, confidence (default)": {"policy": "aspire"},
    "refresh, shadow price, confidence": {"policy": "shadow_price"},
    "refresh, the paper's rule, regression": {"policy": "aspire", "predictor": "regression"},
}


def variants(gammas: Sequence[int]) -> dict[str, list[dict[str, Any]]]:
    """Settings to run, by name; several where a length is to be swept."""
    rows: dict[str, list[dict[str, Any]]] = {"plain": [{"scheduler": {"policy": "ar"}}]}
    for name, (selection, policy) in _FIXED.items():
        rows[name] = [
            {"context": {"selection": selection}, "scheduler": {"policy": policy, "gamma": gamma}}
            for gamma in gammas
        ]
    rows |= {name: [{"scheduler": scheduler}] for name, scheduler in _ADAPTIVE.items()}
    rows["refresh, length by feedback (ASPIRE-FSM)"] = [{"scheduler": {"policy": "feedback"}}]
    rows["refresh, the paper's rule, constant cost"] = [
        {"scheduler": {"policy": "constant_cost", "cost_ratio": ratio}} for ratio in _COST_RATIOS
    ]
    for name, context in {
        "window": {"selection": "window"},
        "hybrid": {"selection": "hybrid"},
        "hybrid, 8-token pages": _HYBRID,
        "last verify per layer": {"selection": "last_verify_per_layer"},
    }.items():
        rows[f"{name}, the paper's rule, confidence"] = [{"context": context}]
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Run every variant and write the result file and the plot."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--gammas", type=int, nargs="+", default=[4, 6, 8, 12])
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="prompt tokens")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="variants whose name begins so")
    parser.add_argument("--out", type=Path, default=cache_root() / "ablation.json")
    options = parser.parse_args(argv)
    console = Console()
    exit_on_signals()
    model = model_path()
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    lengths = list(options.lengths)
    prompts = real_texts(tokenizer, lengths, seed=3)
    requests = [Request("/generate, fixed length", prompt) for prompt in prompts]
    config = cache_root() / "ablation.yaml"
    config.parent.mkdir(parents=True, exist_ok=True)
    config.write_text("")
    room = sum(lengths) + len(lengths) * (options.new_tokens + 128)
    args = aspire_args(
        plain_args(
            model,
            dtype=options.dtype,
            max_total_tokens=room,
            max_running_requests=len(lengths),
        ),
        config,
    )
    runs = [
        (name, settings)
        for name, several in variants(options.gammas).items()
        if options.only is None or name.startswith(("plain", *options.only))
        for settings in several
    ]
    rates: dict[int, list[float]] = {place: [] for place in range(len(runs))}
    drafts: dict[int, list[float]] = {place: [] for place in range(len(runs))}
    with Server(args, log=cache_root() / "logs" / "ablation.log", console=console) as server:

        def run(tokens: int, label: str) -> float:
            done = run_round(
                server.url,
                requests,
                tokens,
                label=label,
                console=Console(quiet=True),
            )
            return decode_speed(done.answers) if tokens > 1 else 0.0

        with console.status("prefill"):
            run(1, "prefill")
        for repeat in range(options.repeats):
            # Alternate the order, so that a drift of the machine favours nobody.
            order = list(range(len(runs)))[:: 1 if repeat % 2 == 0 else -1]
            for place in track(order, f"round {repeat + 1}", console=console):
                config.write_text(yaml.safe_dump(runs[place][1]))
                if not reload_config(server.url):
                    raise RuntimeError("the server did not take a configuration; see its log")
                before = aspire_block(server.url)
                rates[place].append(run(options.new_tokens, f"ablation-{place}-{repeat}"))
                drafts[place].append(_accepted_share(before, aspire_block(server.url)))
    results = [
        {
            "name": name,
            "settings": settings,
            "tokens_per_s": rates[place],
            "accepted_share": drafts[place],
        }
        for place, (name, settings) in enumerate(runs)
    ]
    best = _best(results)
    _show(console, best)
    _plot(best, options.out.with_suffix(".png"))
    options.out.write_text(
        json.dumps(
            {
                **provenance(["bench/ablation.py", *(argv or sys.argv[1:])]),
                "dtype": options.dtype,
                "prompt_tokens": lengths,
                "new_tokens": options.new_tokens,
                "results": results,
            },
            indent=2,
        )
        + "\n"
    )
    console.print(f"result: {options.out} and {options.out.with_suffix('.png')}")
    return 0


def _accepted_share(before: dict[str, Any], after: dict[str, Any]) -> float:
    """Accepted drafts over drafts, between two looks at the server's totals."""
    accepted, discarded = (
        after.get(name, 0) - before.get(name, 0) for name in ("accepted_drafts", "discarded_drafts")
    )
    return accepted / (accepted + discarded) if accepted + discarded else 0.0


def _best(results: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """By name the settings with the highest median rate."""
    best: dict[str, dict[str, Any]] = {}
    for result in results:
        median = statistics.median(result["tokens_per_s"])
        if result["name"] not in best or median > best[result["name"]]["median"]:
            best[result["name"]] = {**result, "median": median}
    return best


def _show(console: Console, best: dict[str, dict[str, Any]]) -> None:
    table = Table(title="decode tokens/s of mixed requests; fixed lengths at their best")
    for title in ("schedule and context", "gamma", "tokens/s (least to most)", "plain", "accepted"):
        table.add_column(title, justify="left" if title.startswith("schedule") else "right")
    plain = best["plain"]["median"]
    for name, result in best.items():
        rates = result["tokens_per_s"]
        table.add_row(
            name,
            str(result["settings"].get("scheduler", {}).get("gamma", "-")),
            f"{result['median']:.1f} ({min(rates):.1f}-{max(rates):.1f})",
            f"{result['median'] / plain:.2f}x",
            f"{statistics.median(result['accepted_share']):.0%}" if name != "plain" else "-",
        )
    console.print(table)


def _plot(best: dict[str, dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(best)[::-1]
    medians = [best[name]["median"] for name in names]
    rates = [best[name]["tokens_per_s"] for name in names]
    below = [median - min(few) for few, median in zip(rates, medians, strict=True)]
    above = [max(few) - median for few, median in zip(rates, medians, strict=True)]
    figure, axis = pyplot.subplots(figsize=(9, 5), layout="constrained")
    axis.barh(names, medians, xerr=[below, above], capsize=3)
    axis.set_xlabel("decode tokens/s (median, least to most)")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


if __name__ == "__main__":
    raise SystemExit(main())
