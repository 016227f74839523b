"""How far the simulator is from a GPU: every schedule of an ablation, replayed and measured.

    python bench/simulator_check.py bench/results/h200-schedules.json \\
        bench/results/h200-accepts.json

Contexts and output lengths are those of the run, acceptance is what was recorded of the same
requests in rounds of their own (:func:`bench.replay.read_record`), and step times are the cost
model's, ``--cost``. Compared are tokens per second of device time, medians of the rounds.
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
from bench.replay import read_record
from bench.simulator import LAYERS, Workload, simulate

GAMMA_MAX = 16


def cells(table: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Rounds on the context ``refresh`` by the text of their scheduler's settings."""
    found: dict[str, list[dict[str, Any]]] = {}
    for line in table.values():
        if line["engine"] != "context_refresh_16":
            continue
        for entry in line["sweep"] + line["finals"]:
            settings = yaml.safe_load(entry["settings"])["scheduler"]
            if entry["tokens_per_s_of_device_time"] and settings["policy"] != "ar":
                key = ", ".join(f"{name}: {value}" for name, value in settings.items())
                found.setdefault(key, []).append(entry)
    return found


def compare(found: dict[str, Any], record: Path, cost: CostModel) -> dict[str, Any]:
    """Per temperature and schedule what was replayed and measured, and the relative error.

    Args:
        found: a phase of ``bench/gpu_ablation.py``.
        record: outcomes of the same requests' drafts.
    """
    result: dict[str, Any] = {}
    for name, table in found.items():
        if not name.startswith("temperature"):
            continue
        traces, prompts = read_record(record, float(name.split()[1]))
        work = Workload(
            len(prompts),
            ratio=0.07,
            refreshing=1 / LAYERS,
            prompts=prompts,
            new_tokens=found["new_tokens"],
            waves=found["waves"],
        )
        lines = {}
        for key, entries in cells(table).items():
            policy = policy_of(SchedulerConfig(**yaml.safe_load(f"{{{key}}}")), GAMMA_MAX)
            outcome = simulate(policy, work, cost, 10**6, gamma_max=GAMMA_MAX, traces=traces)
            guess = outcome.full_rate if work.waves > 1 else outcome.rate
            real = statistics.median(e["tokens_per_s_of_device_time"] for e in entries)
            lines[key] = {"replayed": guess, "measured": real, "error": guess / real - 1.0}
        errors = [abs(line["error"]) for line in lines.values()]
        result[name] = {
            "median_error": statistics.median(errors),
            "worst_error": max(errors),
            "lines": lines,
        }
    return result


def show(result: dict[str, Any]) -> None:
    """Print what :func:`compare` found."""
    for name, found in result.items():
        print(
            f"{name}: error {found['median_error']:.1%} in the median, "
            f"{found['worst_error']:.1%} at worst"
        )
        for key, line in found["lines"].items():
            print(
                f"  {key:55}{line['replayed']:9,.0f} replayed{line['measured']:9,.0f} measured "
                f"{line['error']:+.1%}"
            )


def main() -> None:
    """Print the comparison for one file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("measured", type=Path)
    parser.add_argument("record", type=Path)
    parser.add_argument(
        "--cost",
        type=float,
        nargs=3,
        default=(1.45e-3, 0.93e-6, 6.7e-9),
        metavar=("FIXED", "PER_TOKEN", "PER_KV"),
        help="seconds; of an H200",
    )
    options = parser.parse_args()
    content = json.loads(options.measured.read_text())
    for phase in ("ablation", "waves"):
        print(phase)
        show(compare(content[phase], options.record, CostModel(*options.cost)))


if __name__ == "__main__":
    main()
