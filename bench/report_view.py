"""Show the demo's report in the terminal."""

from __future__ import annotations

from rich import box
from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from bench.report import Report, RequestReport
from bench.rounds import Request

TEXT_SHOWN = 420

LEGEND = (
    "accept length: new tokens per verify (plain decoding: 1). mean draft: drafts per verify, "
    "chosen per request while it runs; 0 means that plain decoding was the better choice.\n"
)
SLOWER = (
    "ASPIRE was slower here. Other work on the machine, or texts that are hard to draft, can do "
    "that: run it again on a quiet machine, and see 'When it is slower' in the "
    "README."
)


def show_requests(console: Console, requests: list[Request]) -> None:
    """What will be asked."""
    table = Table("", "door", "kind", "tokens", "text", box=box.SIMPLE_HEAD, title="Requests")
    for i, request in enumerate(requests, start=1):
        prompt = request.prompt
        tokens = f"{len(prompt.input_ids):,}"
        table.add_row(str(i), request.door, prompt.kind, tokens, prompt.title)
    console.print(table)


def show_report(console: Console, report: Report) -> None:
    """Texts, the table of requests, and the totals."""
    for i, request in enumerate(report.requests, start=1):
        console.print(_texts(i, request))
    console.print(_table(report))
    console.print(LEGEND, style="dim", highlight=False)
    console.print(_totals(report))
    if report.speedup < 1:
        console.print(SLOWER, style="yellow", highlight=False)


def _texts(number: int, request: RequestReport) -> Panel:
    shown = [
        Text("... " + request.prompt_end[-160:].strip(), style="dim"),
        Text(_shorten(request.text), style="green"),
    ]
    if request.identical:
        shown.append(Text("plain decoding: the same text", style="dim"))
    else:
        shown.append(Text("plain decoding: " + _shorten(request.plain_text), style="yellow"))
    title = f"{number}: {request.kind} through {request.door}, {request.prompt_tokens:,} tokens"
    return Panel(Group(*shown), title=title, title_align="left")


def _shorten(text: str) -> str:
    return text.strip() if len(text) <= TEXT_SHOWN else text[:TEXT_SHOWN].strip() + " ..."


def _table(report: Report) -> Table:
    # No column for the door, and two-line headings: the table has to fit into 80 columns.
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    table.add_column("")
    table.add_column("kind", no_wrap=True)
    numbers = (
        "prompt\ntokens",
        "new\ntokens",
        "accept\nlength",
        "mean\ndraft",
        "drafts/\nverifies",
    )
    for name in (*numbers, "plain\ntok/s", "ASPIRE\ntok/s"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("text")
    for i, request in enumerate(report.requests, start=1):
        table.add_row(
            str(i),
            request.kind,
            f"{request.prompt_tokens:,}",
            str(request.completion_tokens),
            f"{request.accept_length:.2f}",
            f"{request.mean_draft_length:.2f}",
            f"{request.draft_steps}/{request.verify_steps}",
            f"{request.tokens_per_s.plain:.1f}",
            f"{request.tokens_per_s.aspire:.1f}",
            "same" if request.identical else "differs",
        )
    return table


def _totals(report: Report) -> Table:
    speed, whole = report.tokens_per_s, report.tokens_per_s_end_to_end
    greedy, same = report.greedy_consistent, report.identical
    table = Table(box=None, show_header=False)
    rows = {
        "decoding, tokens/s": f"{speed.plain:.1f} plain, {speed.aspire:.1f} ASPIRE: "
        f"[bold]{report.speedup:.2f} times as fast[/bold]",
        "with prefill, tokens/s": f"{whole.plain:.1f} plain, {whole.aspire:.1f} ASPIRE "
        f"(prefill {report.prefill_s.plain:.0f} s, {report.prefill_s.aspire:.0f} s)",
        "steps with drafts and verifies": f"{report.mixed_steps} of {report.decode_steps} "
        f"({report.mixed_step_fraction:.0%})",
        "greedy-consistent answers": f"{greedy.n} of {greedy.of} (tolerance {greedy.tau:.1e})",
        "answers identical to plain": f"{same.n} of {same.of}",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    return table
