"""Result files as tables: one reader per kind of file, told apart by what the file holds."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from typing import Any

import pandas as pd
import yaml

Result = dict[str, Any]


def speed_up(result: Result) -> pd.DataFrame:
    """``bench/speed.py``, and engines timed by ``bench/gpu_lab.py``: one row per load."""
    rows = []
    for name, case in result.get("cases", {}).items():
        rates = case["tokens_per_s"]
        if {"ASPIRE", "plain"} <= rates.keys():
            size = f"{case['requests']} x {case['prompt_tokens']}"
            rows.append(_pair(f"{name}: {size}", rates["plain"], rates["ASPIRE"]))
    for part in ("timed", "short"):
        for name, servers in result.get(part, {}).items():
            if {"stock", "default"} <= servers.keys():
                plain, ours = (
                    [repeat["steady_tokens_per_s"] for repeat in servers[server]["repeats"]]
                    for server in ("stock", "default")
                )
                rows.append(_pair(name, plain, ours))
    return pd.DataFrame(rows)


def _pair(load: str, plain: list[float], ours: list[float]) -> dict[str, Any]:
    return {
        "load": load,
        "plain tokens/s": statistics.median(plain),
        "ASPIRE tokens/s": statistics.median(ours),
        "ratio": statistics.median(ours) / statistics.median(plain),
        "lowest": min(ours) / max(plain),
        "highest": max(ours) / min(plain),
    }


def ablation(result: Result) -> pd.DataFrame:
    """``bench/ablation.py``: schedules and contexts, swept ones at their best cell."""
    best: dict[str, dict[str, Any]] = {}
    for cell in result["results"]:
        rates = cell["tokens_per_s"]
        median = statistics.median(rates)
        if cell["name"] not in best or median > best[cell["name"]]["tokens/s"]:
            best[cell["name"]] = {
                "schedule and context": cell["name"],
                "gamma": str(cell["settings"].get("scheduler", {}).get("gamma") or "-"),
                "tokens/s": median,
                "lowest": min(rates),
                "highest": max(rates),
                "accepted": statistics.median(cell["accepted_share"]),
            }
    frame = pd.DataFrame(best.values())
    frame["ratio"] = frame["tokens/s"] / best["plain"]["tokens/s"] if "plain" in best else None
    return frame


PHASES = {"ablation": "all at once", "waves": "one after another"}
"""Parts of a result of ``bench/gpu_ablation.py``."""


def tables(result: Result) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Of ``bench/gpu_ablation.py``: how requests come, sampling, and lines by name."""
    for phase, how in PHASES.items():
        for key, table in result.get(phase, {}).items():
            if key.startswith("temperature"):
                yield how, key, table


def gpu_ablation(result: Result) -> pd.DataFrame:
    """``bench/gpu_ablation.py``: one row per way in which requests come, sampling and schedule."""
    rows = []
    for how, sampling, table in tables(result):
        stock = [entry["tokens_per_s"] for entry in table.get("stock", {}).get("finals", [])]
        for name, line in table.items():
            finals = line["finals"]
            if not finals:
                continue

            def median(key: str, finals: list[dict[str, Any]] = finals) -> float | None:
                values = [entry[key] for entry in finals if entry.get(key)]
                return statistics.median(values) if values else None

            # A round of waves that was never full has none.
            rates = [entry["tokens_per_s"] for entry in finals if entry["tokens_per_s"]]
            if not rates:
                continue
            rows.append(
                {
                    "requests": how,
                    "sampling": sampling,
                    "context and schedule": name,
                    "setting": _setting(finals[0]["settings"]),
                    "tokens/s": statistics.median(rates),
                    "lowest": min(rates),
                    "highest": max(rates),
                    "ratio": statistics.median(rates) / statistics.median(stock) if stock else None,
                    "tokens/s of device time": median("tokens_per_s_of_device_time"),
                    "accept length": median("accept_length"),
                    "discarded drafts": median("discarded_drafts"),
                    "mixed steps": median("mixed_fraction"),
                    "ms per token, p50": _tpot(finals, "p50"),
                    "ms per token, p99": _tpot(finals, "p99"),
                }
            )
    return pd.DataFrame(rows)


def _setting(settings: str) -> str:
    """The draft length or cost ratio of a line's best cell."""
    scheduler = (yaml.safe_load(settings) or {}).get("scheduler", {}) if settings else {}
    return str(scheduler.get("gamma") or scheduler.get("cost_ratio") or "-")


def _tpot(finals: list[dict[str, Any]], share: str) -> float | None:
    values = [entry["tpot_ms"][share] for entry in finals if "tpot_ms" in entry]
    return statistics.median(values) if values else None


def contexts(result: Result) -> pd.DataFrame:
    """``bench/contexts.py`` and ``bench/context_loops.py``: accept lengths of draft contexts."""
    groups = {k: v["results"] for k, v in result.items() if k.startswith("temperature_")}
    for key, cells in (groups or {"": result["results"]}).items():
        default = f"temperature {key.removeprefix('temperature_')}" if key else ""
        groups[key] = {
            name: {"group": f"temperature {cell['temperature']}", **cell}
            if "temperature" in cell
            else {"group": default, **cell}
            for name, cell in cells.items()
        }
    return pd.DataFrame(
        {
            "sampling": cell["group"],
            "draft context": name,
            "accept length": cell["accept_length"],
            "standard error": cell.get("standard_error"),
            "rate": cell["rate"],
            "verifies": cell["verifies"],
        }
        for cells in groups.values()
        for name, cell in cells.items()
    )


def demo(result: Result) -> pd.DataFrame:
    """``bench/demo.py``: one row per request."""
    return pd.DataFrame(
        {
            "request": f"{request['kind']}, {request['prompt_tokens']:,} tokens",
            "accept length": request["accept_length"],
            "mean draft": request["mean_draft_length"],
            "drafts": request["draft_steps"],
            "verifies": request["verify_steps"],
            "plain tokens/s": request["tokens_per_s"]["plain"],
            "ASPIRE tokens/s": request["tokens_per_s"]["aspire"],
            "identical": request["identical"],
        }
        for request in result["requests"]
    )


def replay(result: Result) -> pd.DataFrame:
    """``bench/replay.py``: schedules on recorded acceptance."""
    plain = result["results"]["A0 plain"]["tokens_per_s"]
    oracle = result["results"]["A10 oracle"]["tokens_per_s"]
    return pd.DataFrame(
        {
            "schedule": name,
            "replayed tokens/s": cell["tokens_per_s"],
            "ratio": cell["tokens_per_s"] / plain,
            "of the oracle": cell["tokens_per_s"] / oracle,
        }
        for name, cell in result["results"].items()
    )


def kind_of(result: Any) -> str | None:
    """The kind of a result file, None for one that has no table here."""
    if not isinstance(result, dict):
        return None
    if "server_flags" in result:
        return "demo"
    if "cases" in result or "timed" in result:
        return "speed_up"
    # Earlier results of the kind hold other figures.
    if any("waves" in result.get(phase, ()) for phase in PHASES):
        return "gpu_ablation"
    cells = result.get("results")
    if isinstance(cells, list) and cells and "accepted_share" in cells[0]:
        return "ablation"
    if isinstance(cells, dict) and "A10 oracle" in cells:
        return "replay"
    grouped = [v for k, v in result.items() if k.startswith("temperature_")]
    shown = grouped[0]["results"] if grouped else cells
    first = next(iter(shown.values()), None) if isinstance(shown, dict) else None
    return "contexts" if isinstance(first, dict) and "accept_length" in first else None


READERS: dict[str, Callable[[Result], pd.DataFrame]] = {
    "speed_up": speed_up,
    "ablation": ablation,
    "gpu_ablation": gpu_ablation,
    "contexts": contexts,
    "demo": demo,
    "replay": replay,
}
