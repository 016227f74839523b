"""One report of result files: tables as Markdown, plots as PNG, and both as one HTML page.

    python -m bench.render                        # bench/results into ./report
    python -m bench.render FILE.json ... --out DIR

Files of a kind it has no table for are named and left out.
"""

from __future__ import annotations

import argparse
import base64
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment

from bench import render_plots
from bench.paths import ROOT
from bench.render_tables import READERS, kind_of, tables

TITLES = {
    "speed_up": "Decode speed against plain decoding",
    "ablation": "What each idea is worth",
    "gpu_ablation": "What each idea is worth on a GPU",
    "contexts": "How well draft contexts predict the model",
    "demo": "The demo",
    "replay": "Schedules on replayed acceptance (modelled step times)",
}
DEFAULT_LINE = "refresh, the paper's rule"
PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>Results</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; margin: 1rem 0 }
td, th { padding: .2rem .7rem; text-align: right }
td:first-child, th:first-child, td:nth-child(2) { text-align: left }
tr { border-bottom: 1px solid #ddd } img { max-width: 100% } .about { color: #555 }
</style>
<h1>Results</h1>
{% for part in parts %}
<h2>{{ part.title }}</h2>
<p class="about">{{ part.about }}</p>
{{ part.table | safe }}
{% for picture in part.pictures %}
<img alt="{{ part.title }}" src="data:image/png;base64,{{ picture }}">
{% endfor %}
{% endfor %}
</html>
"""


@dataclass
class Part:
    """One result file of the report; ``pictures`` lie beside the report."""

    title: str
    about: str
    frame: pd.DataFrame
    pictures: list[Path] = field(default_factory=list)


def part_of(path: Path, out: Path) -> Part | None:
    """Read a result file and draw its pictures; None if there is no table for its kind."""
    result = json.loads(path.read_text())
    kind = kind_of(result)
    if kind is None:
        return None
    frame = READERS[kind](result)
    if frame.empty:
        return None
    part = Part(f"{TITLES[kind]}: {path.stem}", _about(result), frame)

    def picture(name: str = "") -> Path:
        part.pictures.append(out / f"{path.stem}{name}.png")
        return part.pictures[-1]

    if kind == "speed_up":
        render_plots.bars(frame, "load", "ratio", picture(), spread=("lowest", "highest"), line=1.0)
    elif kind == "ablation":
        render_plots.bars(
            frame,
            "schedule and context",
            "tokens/s",
            picture(),
            spread=("lowest", "highest"),
            line=frame["tokens/s"].iloc[0] if frame.iloc[0, 0] == "plain" else None,
        )
    elif kind == "gpu_ablation":
        for number, (key, group) in enumerate(frame.groupby(["requests", "sampling"], sort=False)):
            stock = group.loc[group["context and schedule"] == "stock", "tokens/s"]
            render_plots.bars(
                group,
                "context and schedule",
                "tokens/s",
                picture(f"-{number}"),
                spread=("lowest", "highest"),
                line=None if stock.empty else stock.iloc[0],
                title=", ".join(map(str, key)),
            )
        counts = {
            f"{how}, {sampling}": table[DEFAULT_LINE]["finals"][0]["verifies_by_drafts"]
            for how, sampling, table in tables(result)
            if table.get(DEFAULT_LINE, {}).get("finals")
        }
        if counts:
            render_plots.lengths(counts, picture("-lengths"))
    elif kind == "contexts":
        for number, (_, group) in enumerate(frame.groupby("sampling", sort=False)):
            render_plots.bars(
                group,
                "draft context",
                "accept length",
                picture(f"-{number}"),
                spread="standard error",
            )
    elif kind == "demo":
        render_plots.timeline(result["requests"], picture("-timeline"))
    elif kind == "replay":
        render_plots.bars(frame, "schedule", "of the oracle", picture(), line=1.0)
    return part


def _about(result: dict[str, Any]) -> str:
    """Command, commit, machine: whatever the file says of its origin."""
    machine = result.get("machine") or result.get("environment") or result.get("device") or ""
    if isinstance(machine, dict):
        named = {k: v for k, v in machine.items() if isinstance(v, (str, int, float))}
        machine = ", ".join(f"{k} {v}" for k, v in named.items())
    facts = [result.get(key) for key in ("command", "study", "label", "commit", "date")]
    errors = result.get("ablation", {}).get("cost_model_error", {})
    misses = [
        f"cost model ({context}) off by {error['median']:.1%} in the median and "
        f"{error['worst_bucket'][1]:.1%} in the worst bucket of {error['steps']} steps"
        for context, error in errors.items()
    ]
    return "; ".join(str(fact) for fact in (*facts, machine, *misses) if fact)


def _printed(frame: pd.DataFrame) -> pd.DataFrame:
    """Figures as text: three digits, or whole numbers with separators."""

    def text(value: Any) -> str:
        if value is None or value != value:
            return "-"
        if isinstance(value, float):
            return f"{value:,.0f}" if abs(value) >= 100 else f"{value:#.3g}"
        return str(value)

    return frame.map(text)


def markdown(parts: Sequence[Part]) -> str:
    """The report as Markdown, pictures linked."""
    lines = ["# Results", ""]
    for part in parts:
        lines += [f"## {part.title}", "", part.about, ""]
        lines += [_printed(part.frame).to_markdown(index=False, disable_numparse=True), ""]
        lines += [f"![{part.title}]({picture.name})" for picture in part.pictures]
        lines.append("")
    return "\n".join(lines)


def page(parts: Sequence[Part]) -> str:
    """The report as one HTML page that holds its pictures."""
    shown = [
        {
            "title": part.title,
            "about": part.about,
            "table": _printed(part.frame).to_html(index=False, border=0),
            "pictures": [base64.b64encode(p.read_bytes()).decode() for p in part.pictures],
        }
        for part in parts
    ]
    return Environment(autoescape=True).from_string(PAGE).render(parts=shown)


def main(argv: Sequence[str] | None = None) -> int:
    """Write ``report.md``, ``report.html`` and the pictures."""
    parser = argparse.ArgumentParser(prog="python -m bench.render", description=__doc__)
    parser.add_argument("results", type=Path, nargs="*", help="files or folders")
    parser.add_argument("--out", type=Path, default=Path("report"))
    options = parser.parse_args(argv)
    given = options.results or [ROOT / "bench" / "results"]
    files = [
        f for path in given for f in (sorted(path.glob("*.json")) if path.is_dir() else [path])
    ]
    options.out.mkdir(parents=True, exist_ok=True)
    parts = []
    for path in files:
        part = part_of(path, options.out)
        if part is None:
            print(f"{path.name}: no table for this kind of file", file=sys.stderr)
        else:
            parts.append(part)
    if not parts:
        print("no result file to show", file=sys.stderr)
        return 1
    (options.out / "report.md").write_text(markdown(parts))
    (options.out / "report.html").write_text(page(parts))
    print(f"{len(parts)} results in {options.out / 'report.md'} and {options.out / 'report.html'}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
