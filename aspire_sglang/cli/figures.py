"""Plots of a calibration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from aspire_sglang.cli.trials import Trial


def plot_trials(
    trials: Sequence[Trial],
    best: Trial,
    promise: Callable[[Trial], float],
    path: Path,
    title: str,
) -> None:
    """Accept length by refresh layer and by budget, as a PNG; ``promise``: tokens per second."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    layers = {t.candidate.refresh_layer: t for t in trials if t.stage.startswith("refresh layer")}
    # All that differ from the best in their budget only, whichever stage tried them.
    budgets = {
        t.candidate.tokens: t
        for t in trials
        if replace(t.candidate, tokens=best.candidate.tokens) == best.candidate
    }
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for axis, found, label in (
        (axes[0], layers, "refresh layer"),
        (axes[1], budgets, "budget, tokens"),
    ):
        places = sorted(found)
        axis.plot(places, [found[place].accept_length for place in places], marker="o")
        axis.set_xlabel(label)
        axis.set_ylabel("accept length")
        axis.set_ylim(bottom=1)
        axis.grid(alpha=0.3)
    if budgets:
        axes[1].set_xscale("log", base=2)
        right = axes[1].twinx()
        places = sorted(budgets)
        right.plot(
            places,
            [promise(budgets[place]) for place in places],
            marker="s",
            color="tab:orange",
        )
        right.set_ylabel("promised tokens/s", color="tab:orange")
    figure.suptitle(title)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
