"""Tables of results as pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd


def _figure(height: float) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot.subplots(figsize=(9, height), layout="constrained")


def _save(figure: Any, path: Path) -> None:
    from matplotlib import pyplot

    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def bars(
    frame: pd.DataFrame,
    label: str,
    value: str,
    path: Path,
    *,
    spread: tuple[str, str] | str | None = None,
    line: float | None = None,
    title: str = "",
) -> None:
    """Horizontal bars, the first row on top.

    Args:
        spread: columns of the least and the greatest value, or one of a standard error.
        line: where to mark a reference.
    """
    figure, axis = _figure(1.2 + 0.32 * len(frame))
    shown = frame.iloc[::-1]
    errors = None
    if isinstance(spread, str):
        errors = shown[spread].fillna(0.0)
    elif spread is not None:
        errors = [
            (shown[value] - shown[spread[0]]).clip(lower=0),
            (shown[spread[1]] - shown[value]).clip(lower=0),
        ]
    axis.barh(shown[label].astype(str), shown[value], xerr=errors, capsize=3, color="tab:blue")
    if line is not None:
        axis.axvline(line, color="0.3", linestyle="--", linewidth=1)
    axis.set_xlabel(value)
    axis.set_title(title)
    _save(figure, path)


def timeline(requests: list[dict[str, Any]], path: Path, steps: int = 120) -> None:
    """The first decode steps of every request of a mixed run: drafts light, verifies dark.

    Each lane counts the decode steps of its own request. Requests of one round start together, so
    the same place in two lanes is about the same step of the server.
    """
    figure, axis = _figure(1.2 + 0.4 * len(requests))
    for lane, request in enumerate(requests):
        drafts, verifies, at = [], [], 0
        for length in request["draft_length_sequence"]:
            if at >= steps:
                break
            if length:
                drafts.append((at, length))
            verifies.append((at + length, 1))
            at += length + 1
        axis.broken_barh(drafts, (lane - 0.4, 0.8), color="lightsteelblue")
        axis.broken_barh(verifies, (lane - 0.4, 0.8), color="tab:blue")
    axis.set_yticks(
        range(len(requests)), [f"{r['kind']}, {r['prompt_tokens']:,} tokens" for r in requests]
    )
    axis.invert_yaxis()
    axis.set_xlim(0, steps)
    axis.set_xlabel("decode step of the request: drafts light, verifies dark")
    _save(figure, path)


def lengths(counts: dict[str, dict[str, int]], path: Path) -> None:
    """How many verifies held how many drafts, as shares.

    Args:
        counts: verifies by number of drafts, per line of the plot.
    """
    figure, axis = _figure(3.5)
    width = 0.8 / max(len(counts), 1)
    for place, (name, verifies) in enumerate(counts.items()):
        total = sum(verifies.values())
        drafts = sorted(verifies, key=int)
        axis.bar(
            [int(n) + (place + 0.5) * width - 0.4 for n in drafts],
            [verifies[n] / total for n in drafts],
            width,
            label=name,
        )
    axis.set_xticks(range(1 + max(int(n) for verifies in counts.values() for n in verifies)))
    axis.set_xlabel("drafts before a verify")
    axis.set_ylabel("share of the verifies")
    axis.legend()
    _save(figure, path)
