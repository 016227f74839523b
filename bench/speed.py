"""Decode speed on this machine: ASPIRE, plain decoding on the same backend, and torch_native.

``python bench/speed.py`` starts the three servers, warms their prefix caches with the same prompts
and times the same decode round on each in turn, several times, then writes a JSON file. Only one
server computes at a time; idle ones sleep.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.console import Console
from rich.table import Table

from aspire_sglang.cli.client import aspire_block
from aspire_sglang.cli.server import Server, aspire_args, exit_on_signals, plain_args
from aspire_sglang.cli.texts import real_texts
from bench.answer import decode_speed
from bench.paths import ROOT
from bench.provenance import provenance
from bench.rounds import Request, Round, run_round
from bench.smollm2 import cache_root, model_path

CASES = {"long": (8, 6000, 256), "short": (8, 200, 256)}
"""Case: requests, prompt tokens of each, new tokens of each."""

SERVERS = ("ASPIRE", "plain", "torch_native")


def main(argv: Sequence[str] | None = None) -> int:
    """Run all cases and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--case", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--servers", nargs="+", choices=SERVERS, default=list(SERVERS))
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "smollm2-135m.yaml")
    parser.add_argument("--out", type=Path, default=cache_root() / "speed.json")
    options = parser.parse_args(argv)
    console = Console()
    exit_on_signals()
    model = model_path()
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    with ExitStack() as stack:
        servers = _start(options, model, stack, console)
        cases = {
            name: _case(name, servers, options.repeats, tokenizer, console) for name in options.case
        }
    result = {
        **provenance(["bench/speed.py", *(argv or sys.argv[1:])]),
        "dtype": options.dtype,
        "config": options.config.read_text(),
        "cases": cases,
    }
    options.out.write_text(json.dumps(result, indent=2) + "\n")
    _show(console, cases)
    console.print(f"result: {options.out}")
    return 0


def _start(
    options: argparse.Namespace, model: Path, stack: ExitStack, console: Console
) -> dict[str, Server]:
    size = {"dtype": options.dtype, "max_total_tokens": 56_000, "max_running_requests": 8}
    plain = plain_args(model, **size)
    flags = {
        "ASPIRE": aspire_args(plain, options.config.resolve()),
        "plain": plain,
        "torch_native": plain_args(model, attention_backend="torch_native", **size),
    }
    servers = {}
    for name in options.servers:
        log = cache_root() / "logs" / f"speed-{name}.log"
        server = Server(flags[name], log=log, name=f"{name} server", console=console)
        servers[name] = stack.enter_context(server)
    return servers


def _case(
    name: str, servers: dict[str, Server], repeats: int, tokenizer: Any, console: Console
) -> dict[str, Any]:
    count, length, new_tokens = CASES[name]
    prompts = real_texts(tokenizer, [length] * count, seed=1)
    requests = [Request("/generate, fixed length", prompt) for prompt in prompts]

    def run(server: str, tokens: int, label: str) -> Round:
        return run_round(servers[server].url, requests, tokens, label=label, console=console)

    for server in servers:
        run(server, 1, f"{name}, {server}, prefill")
    speeds: dict[str, list[float]] = {server: [] for server in servers}
    identical = []
    for repeat in range(repeats):
        # Alternate the order, so that a drift of the machine favours nobody.
        order = list(servers) if repeat % 2 == 0 else list(reversed(servers))
        ids: dict[str, list[list[int]]] = {}
        for server in order:
            answers = run(server, new_tokens, f"{name}, {server}, round {repeat + 1}").answers
            speeds[server].append(decode_speed(answers))
            ids[server] = [answer.output_ids for answer in answers]
        if {"ASPIRE", "plain"} <= ids.keys():
            pairs = zip(ids["ASPIRE"], ids["plain"], strict=True)
            identical.append(sum(a == b for a, b in pairs))
    block = aspire_block(servers["ASPIRE"].url) if "ASPIRE" in servers else {}
    block.pop("requests", None)
    return {
        "requests": count,
        "prompt_tokens": length,
        "new_tokens": new_tokens,
        "tokens_per_s": speeds,
        "median": {server: statistics.median(values) for server, values in speeds.items()},
        "identical_answers": identical,
        "aspire": block,
    }


def _show(console: Console, cases: dict[str, Any]) -> None:
    table = Table(title="decode tokens/s, median of the rounds (least to most)")
    for title in ("case", *SERVERS, "ASPIRE / plain", "plain / torch_native"):
        table.add_column(title, justify="right")
    for name, case in cases.items():
        row = [f"{name}: {case['requests']} x {case['prompt_tokens']}"]
        for server in SERVERS:
            values = case["tokens_per_s"].get(server)
            row.append(
                f"{case['median'][server]:.1f} ({min(values):.1f}-{max(values):.1f})"
                if values
                else "-"
            )
        for over, under in (("ASPIRE", "plain"), ("plain", "torch_native")):
            both = {over, under} <= case["median"].keys()
            row.append(f"{case['median'][over] / case['median'][under]:.2f}" if both else "-")
        table.add_row(*row)
    console.print(table)


if __name__ == "__main__":
    raise SystemExit(main())
