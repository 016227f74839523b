"""The command ``aspire``."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from aspire_sglang.cli import machine
from aspire_sglang.cli.server import ServerError, exit_on_signals

if TYPE_CHECKING:
    from aspire_sglang.cli.calibrate import Calibration
    from aspire_sglang.cli.trials import Trial

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)


@app.callback()
def main() -> None:
    """ASPIRE for SGLang: tools around a server."""


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def calibrate(
    context: typer.Context,
    model: Annotated[str, typer.Option(help="Path or name of the model, as for SGLang.")],
    out: Annotated[
        Path | None, typer.Option(help="Configuration to write; default MODEL.yaml here.")
    ] = None,
    text: Annotated[
        list[Path] | None,
        typer.Option(help="Text file to calibrate on, repeatable; default: Python's manuals."),
    ] = None,
    length: Annotated[int, typer.Option(help="Tokens of a prompt.")] = 6000,
    texts: Annotated[int, typer.Option(help="Prompts; each trial continues all of them.")] = 6,
    new_tokens: Annotated[int, typer.Option(help="Tokens per prompt and trial.")] = 96,
    gamma: Annotated[int, typer.Option(help="Drafts per verify in the trials.")] = 16,
    batch: Annotated[int, typer.Option(help="Running requests to choose the budget for.")] = 8,
    work: Annotated[
        Path | None, typer.Option(help="Where trials are kept, to go on after a break.")
    ] = None,
) -> None:
    """Find the refresh layer, head reduction, page size, budget and draft context for MODEL on this
    machine.

    What follows -- goes to the server as it is:

        aspire calibrate --model MODEL --out MODEL.yaml -- --dtype bfloat16

    Finished trials are kept, so the same command goes on after an interruption.
    """
    from aspire_sglang.cli.calibrate import calibrate as run
    from aspire_sglang.cli.calibrate import promise, written_config
    from aspire_sglang.cli.figures import plot_trials
    from aspire_sglang.cli.prompts import load_plan

    console = Console()
    exit_on_signals()
    name = Path(model).name
    work = work or Path.home() / ".cache" / "aspire-sglang" / "calibrate" / name
    out = out or Path(f"{name}.yaml")
    try:
        plan = load_plan(model, context.args, text or [], length, texts, new_tokens, gamma, batch)
        found = run(plan, work, console)
    except (ValueError, RuntimeError, ServerError) as fault:
        console.print(f"[red]{fault}[/red]")
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        console.print(f"interrupted; finished trials are in {work}, the same command goes on")
        raise typer.Exit(130) from None
    console.print(_trials_table(found, lambda trial: promise(plan, found.cost, trial)))
    provenance = {
        "machine": ", ".join(f"{k} {v}" for k, v in machine.describe_machine().items()),
        "versions": ", ".join(f"{k} {v}" for k, v in machine.describe_versions().items()),
        "flags": " ".join(context.args) or "none",
    }
    out.write_text(written_config(plan, found, provenance))
    picture = out.with_suffix(".png")
    title = f"{name}, aspire-sglang {_version()}"
    tried = [trial for trial in found.trials if trial.tokens_per_s is None]
    plot_trials(tried, found.best, lambda trial: promise(plan, found.cost, trial), picture, title)
    console.print(f"wrote {out} and {picture}; use it with --aspire-config {out}")


def _trials_table(found: Calibration, promise: Callable[[Trial], float]) -> Table:
    table = Table(title="trials", caption="* chosen")
    for title in (
        "",
        "varied",
        "layer",
        "reduction",
        "page",
        "tokens",
        "context",
        "accept length",
        "tok/s",
    ):
        table.add_column(title, justify="right")
    for trial in found.trials:
        tried = trial.candidate
        table.add_row(
            "*" if trial in (found.best, found.fastest) else "",
            trial.stage,
            str(tried.refresh_layer),
            tried.reduction,
            str(tried.page_size),
            str(tried.tokens),
            tried.selection,
            f"{trial.accept_length:.2f}",
            f"{promise(trial):.1f} promised"
            if trial.tokens_per_s is None
            else f"{trial.tokens_per_s:.1f} measured",
        )
    return table


def _version() -> str:
    return importlib.metadata.version("aspire-sglang")
