"""How far the simulator is from a GPU: every schedule of an ablation, simulated and measured.

    python bench/simulator_check.py bench/results/h200-ablation.json

Contexts, output lengths and step costs are those of the run; acceptance is one number per
temperature, fitted to the accept length of one fixed length, ``--fit``. All other schedules
are predicted. Compared are tokens per second of device time, medians of the rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import yaml

from aspire_sglang.config import SchedulerConfig
from aspire_sglang.runtime.modes import policy_of
from aspire_sglang.speculation.cost_model import CostModel
from bench.simulator import Outcome, Workload, simulate

LAYERS = 30
"""Of SmolLM2-135M, one of which reads the whole context at every draft."""

SPREAD = 0.05
"""Stretches accept this much more or less than the mean."""

FIT = "policy: fixed, gamma: 3"


def workload(found: dict[str, Any], rate: float) -> Workload:
    """The run's requests, their drafts accepted with probability ``rate``."""
    least, _, most = found["prompts"]["least_mean_most"]
    return Workload(
        requests=found["prompts"]["requests"],
        contexts=(least, most),
        rates=(rate - SPREAD, min(rate + SPREAD, 0.995)),
        stretch=120.0,
        ratio=0.07,
        refreshing=1 / LAYERS,
        log=True,
        new_tokens=found["new_tokens"],
        waves=found.get("waves", 1),
    )


def simulated(settings: dict[str, Any], work: Workload, cost: CostModel) -> Outcome:
    """A run with the policy of an ``aspire`` configuration's section ``scheduler``."""
    policy = policy_of(SchedulerConfig(**settings), 16)
    return simulate(policy, work, cost, 10**6)


def accept_length(outcome: Outcome) -> float:
    """Tokens per verify."""
    return outcome.tokens / len(outcome.lengths)


def fitted_rate(found: dict[str, Any], wanted: float, settings: dict[str, Any]) -> float:
    """The acceptance with which the simulated accept length is the one that was measured."""
    low, high = 0.5, 0.99
    for _ in range(12):
        rate = (low + high) / 2
        work = workload(found, rate)
        if accept_length(simulated(settings, work, CostModel(1e-3, 1e-6, 1e-8))) < wanted:
            low = rate
        else:
            high = rate
    return (low + high) / 2


def cells(table: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Rounds on the context ``refresh`` by the text of their scheduler's settings."""
    found: dict[str, list[dict[str, Any]]] = {}
    for line in table.get("rounds", table).values():
        if line["engine"] != "context_refresh_16":
            continue
        for entry in line["sweep"] + line["finals"]:
            if entry["tokens_per_s_of_device_time"]:
                settings = yaml.safe_load(entry["settings"])["scheduler"]
                key = ", ".join(f"{name}: {value}" for name, value in settings.items())
                found.setdefault(key, []).append(entry)
    return found


def compare(found: dict[str, Any], cost: CostModel, fit: str = FIT) -> dict[str, Any]:
    """Per temperature: the fitted acceptance, and per schedule what was simulated and measured.

    Raises:
        ValueError: the schedule to fit was not run.
    """
    result: dict[str, Any] = {}
    for name, table in found.items():
        if not name.startswith("temperature"):
            continue
        rounds = cells(table)
        if fit not in rounds:
            raise ValueError(f"{name}: no round of {fit!r}, there are {sorted(rounds)}")
        length = statistics.median(entry["accept_length"] for entry in rounds[fit])
        rate = fitted_rate(found, length, yaml.safe_load(f"{{{fit}}}"))
        work, lines = workload(found, rate), {}
        for key, entries in rounds.items():
            outcome = simulated(yaml.safe_load(f"{{{key}}}"), work, cost)
            guess = outcome.full_rate if work.waves > 1 else outcome.rate
            real = statistics.median(e["tokens_per_s_of_device_time"] for e in entries)
            lines[key] = {"simulated": guess, "measured": real, "error": guess / real - 1.0}
        errors = [abs(line["error"]) for line in lines.values()]
        result[name] = {
            "rate": rate,
            "median_error": statistics.median(errors),
            "worst_error": max(errors),
            "lines": lines,
        }
    return result


def main() -> None:
    """Print the comparison for one file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--fit", default=FIT)
    parser.add_argument(
        "--cost",
        type=float,
        nargs=3,
        default=(1.45e-3, 0.93e-6, 6.7e-9),
        metavar=("FIXED", "PER_TOKEN", "PER_KV"),
        help="seconds; of an H200",
    )
    options = parser.parse_args()
    content = json.loads(options.file.read_text())
    for name, found in compare(content, CostModel(*options.cost), options.fit).items():
        print(
            f"{name}: acceptance {found['rate']:.3f} (fitted), error {found['median_error']:.1%} "
            f"in the median, {found['worst_error']:.1%} at worst"
        )
        for key, line in found["lines"].items():
            print(
                f"  {key:55}{line['simulated']:9,.0f} simulated{line['measured']:9,.0f} measured "
                f"{line['error']:+.1%}"
            )


if __name__ == "__main__":
    main()
