"""The demo: concurrent requests with long real texts, with ASPIRE and with plain decoding.

``python bench/demo.py`` runs it and writes ``demo-report.json``; ``--keep`` only serves.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# The `bench` package itself must be importable when this file is run as a script.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.console import Console
from rich.markup import escape

from aspire_sglang.cli.client import aspire_block
from aspire_sglang.cli.server import Server, ServerError, aspire_args, exit_on_signals, plain_args
from aspire_sglang.cli.texts import real_texts
from bench import stats
from bench.doors import DoorError
from bench.paths import ROOT
from bench.provenance import provenance
from bench.report import Report, build_report
from bench.report_view import show_report, show_requests
from bench.rescore import score, tau
from bench.rounds import Request, Round, add_output_ids, run_round
from bench.smollm2 import ModelError, cache_root, model_path

# Door, kind and prompt tokens: short and long, easy and hard to draft, side by side.
REQUESTS = (
    ("/v1/chat/completions", "chat", 500),
    ("sgl.function", "copy", 1500),
    ("/generate", "code", 3000),
    ("/generate", "continuation", 4500),
    ("sgl.function", "chat", 5000),
    ("/v1/chat/completions", "chat", 6000),
    ("/generate", "copy", 6500),
    ("/generate", "continuation", 7000),
)
DEFAULT_CONFIG = ROOT / "configs" / "smollm2-135m.yaml"

CURL = """curl -s {url}/generate -H 'Content-Type: application/json' -d \\
  '{{"text": "The capital of France is", "sampling_params": {{"max_new_tokens": 32}}}}'

curl -sN {url}/v1/chat/completions -H 'Content-Type: application/json' -d \\
  '{{"model": "default", "stream": true,
    "messages": [{{"role": "user", "content": "What is a prime number?"}}]}}'

curl -s {url}/server_info"""


@dataclass(frozen=True)
class Setup:
    """What both servers share, and the only difference between them."""

    plain_flags: list[str]
    aspire_flags: list[str]
    requests: list[Request]
    tokenizer: Any


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo, or serve; return the exit status."""
    options = _parse(argv)
    console = Console()
    exit_on_signals()
    # From packages that are compiled on their first import; nothing the user could act on.
    warnings.filterwarnings("ignore", category=SyntaxWarning)
    try:
        return _serve(options, console) if options.keep else _demo(options, console)
    except KeyboardInterrupt:
        # The servers were ended on the way here.
        console.print("stopped")
        return 130
    except SystemExit:
        console.print("stopped by a signal")
        raise
    except (ServerError, ModelError, DoorError) as error:
        console.print(f"[red]error:[/red] {escape(str(error))}", highlight=False, soft_wrap=True)
        return 1


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keep", action="store_true", help="only serve, until Ctrl-C")
    parser.add_argument("--port", type=int, help="port of the server (30000 with --keep)")
    parser.add_argument("--model", type=Path, help="model directory (default: SmolLM2-135M)")
    parser.add_argument("--aspire-config", type=Path, help="YAML file with ASPIRE's settings")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--new-tokens", type=int, default=128, help="tokens per answer")
    parser.add_argument("--seed", type=int, default=0, help="which texts are taken")
    parser.add_argument("--report", type=Path, default=ROOT / "demo-report.json")
    return parser.parse_args(argv)


def _flags(options: argparse.Namespace) -> tuple[list[str], list[str]]:
    """Flags of the plain and of the ASPIRE server."""
    model = options.model.resolve() if options.model else model_path()
    if not (model / "config.json").is_file():
        raise ModelError(f"There is no model in {model}: config.json is missing.")
    prompt_tokens = sum(length for _, _, length in REQUESTS)
    # Every prompt stays cached between the rounds; a tenth is spare for drafts and answers.
    capacity = int(1.1 * (prompt_tokens + len(REQUESTS) * (options.new_tokens + 64)))
    plain = plain_args(model, dtype=options.dtype, max_total_tokens=capacity)
    config = options.aspire_config
    if config is None and options.model is None and DEFAULT_CONFIG.exists():
        config = DEFAULT_CONFIG
    if config is not None and not config.is_file():
        raise ModelError(f"There is no configuration file {config}.")
    return plain, aspire_args(plain, config and config.resolve())


def _serve(options: argparse.Namespace, console: Console) -> int:
    _, flags = _flags(options)
    log = cache_root() / "logs" / "serve.log"
    port = options.port or 30000
    with Server(flags, log=log, name="ASPIRE server", port=port, console=console) as server:
        console.print(f"serving on [bold]{server.url}[/bold], log in {log}\n")
        console.print(CURL.format(url=server.url), highlight=False, markup=False, soft_wrap=True)
        console.print("\nCtrl-C stops the server.")
        status = server.wait()
    console.print(f"[red]the server ended by itself with exit status {status}[/red], see {log}")
    return 1


def _demo(options: argparse.Namespace, console: Console) -> int:
    setup = _prepare(options, console)
    logs = cache_root() / "logs"

    def server(name: str, flags: list[str]) -> Server:
        log = logs / f"demo-{name}.log"
        return Server(
            flags, log=log, name=f"{name} server", port=options.port, console=console, timeout_s=600
        )

    with server("ASPIRE", setup.aspire_flags) as aspire:
        fill = _round(setup, aspire, 1, "prefill", console)
        before = stats.steps(aspire_block(aspire.url))
        decode = _round(setup, aspire, options.new_tokens, "ASPIRE", console)
        block = aspire_block(aspire.url)
        steps = stats.steps(block) - before
        speculation = [stats.speculation(block, answer) for answer in decode.answers]
        _add_output_ids(setup, aspire, decode)
    with server("plain", setup.plain_flags) as plain:
        plain_fill = _round(setup, plain, 1, "prefill", console)
        plain_decode = _round(setup, plain, options.new_tokens, "plain", console)
        _add_output_ids(setup, plain, plain_decode)
        with console.status("re-scoring the answers by plain decoding"):
            own_gaps = [score(plain.url, answer) for answer in plain_decode.answers]
            gaps = [score(plain.url, answer) for answer in decode.answers]

    report = build_report(
        setup.requests,
        plain=(plain_fill, plain_decode),
        aspire=(fill, decode),
        speculation=speculation,
        steps=steps,
        gaps=gaps,
        tau=tau(own_gaps, options.dtype),
        about=_about(setup),
    )
    show_report(console, report)
    options.report.write_text(report.model_dump_json(indent=2) + "\n")
    console.print(f"report: {options.report}")
    return _verdict(report, console)


def _prepare(options: argparse.Namespace, console: Console) -> Setup:
    plain_flags, aspire_flags = _flags(options)
    with console.status("choosing texts from the Python installation"):
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(plain_flags[1])
        lengths = [length for _, _, length in REQUESTS]
        prompts = real_texts(tokenizer, lengths, options.seed, [kind for _, kind, _ in REQUESTS])
    with console.status("loading SGLang's frontend language"):
        # Seconds of imports that shall not fall into the first round.
        importlib.import_module("sglang")
    requests = [
        Request(door, prompt) for (door, _, _), prompt in zip(REQUESTS, prompts, strict=True)
    ]
    show_requests(console, requests)
    return Setup(plain_flags, aspire_flags, requests, tokenizer)


def _round(setup: Setup, server: Server, new_tokens: int, label: str, console: Console) -> Round:
    return run_round(server.url, setup.requests, new_tokens, label=label, console=console)


def _add_output_ids(setup: Setup, server: Server, decoded: Round) -> None:
    end = setup.tokenizer.eos_token_id
    add_output_ids(server.url, decoded.answers, setup.tokenizer, end)


def _about(setup: Setup) -> dict[str, Any]:
    return {
        **provenance(sys.argv),
        "server_flags": {"plain": setup.plain_flags, "aspire": setup.aspire_flags},
    }


def _verdict(report: Report, console: Console) -> int:
    greedy = report.greedy_consistent
    if greedy.n == greedy.of:
        return 0
    console.print(f"[red]{greedy.of - greedy.n} answers are not what greedy decoding gives[/red]")
    return 1


if __name__ == "__main__":
    sys.exit(main())
