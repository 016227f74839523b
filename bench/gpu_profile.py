"""Where the time of a step goes, on the device and in the scheduler's thread.

Phases of ``bench/gpu_lab.py``.
"""

from __future__ import annotations

import gzip
import io
import json
import pstats
import time
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from bench import gpu_engine

if TYPE_CHECKING:
    from bench.gpu_lab import Lab


def _cases(lab: Lab, temperatures: list[float]) -> Iterator[tuple[str, Any, int, float]]:
    """Stock and every setting of ASPIRE, with each number of requests."""
    for temperature in temperatures:
        for count in lab.options.requests:
            for name in ("stock", *lab.options.settings):
                key = f"{name}, {count} x {lab.options.prompt_tokens}, temperature {temperature}"
                engine = lab.serving(name)
                if engine is not None:
                    yield key, engine, count, temperature


def profile(lab: Lab) -> dict[str, Any]:
    """Where the time of a step goes: device time by kernel, and what the device waits."""
    found = {}
    for key, engine, count, temperature in _cases(lab, lab.options.temperatures):
        # Not before all run.
        wait, tokens = (0.35, 160) if count <= 64 else (0.7, 288)
        found[key] = kernels_of(
            lab.options.out, engine, lab.prompts[:count], temperature, wait, tokens
        )
        lab.say(f"{key}: {found[key]}")
    return found


def timeline(lab: Lab) -> dict[str, Any]:
    """What the scheduler did when, in a run like the timed ones; raw events beside the summary."""
    found: dict[str, Any] = {}
    long = [(count, lab.options.prompt_tokens) for count in lab.options.requests]
    for count, length in (*long, (64, 512), (1, 512)):
        prompts = [prompt[:length] for prompt in lab.prompts[:count]]
        for name in ("stock", *lab.options.settings):
            engine = lab.serving(name)
            if engine is None:
                continue
            engine.answers(prompts, 1)
            engine.answers(prompts, 32)
            path = lab.options.out / f"timeline-{name}-{count}x{length}.json"
            engine.ask("collective_rpc", method="probe_timeline", path=None)
            start = time.perf_counter()
            engine.answers(prompts, 160)
            seconds = time.perf_counter() - start
            engine.ask("collective_rpc", method="probe_timeline", path=str(path))
            key = f"{name}, {count} x {length}"
            found[key] = {"seconds": seconds, **_summary(json.loads(path.read_text()), count)}
            lab.say(f"{key}: {found[key]}")
    return found


def _summary(events: list[list[Any]], rows: int) -> dict[str, Any]:
    """Times of the scheduler's thread by kind of step, in microseconds; and how long the device
    waited between mixed steps of all ``rows`` requests. The longest wait follows a prefill, whose
    requests the host takes in one after another."""
    launches = [event for event in events if event[0] == "launch"]
    found: dict[str, Any] = {}
    for mode in ("prefill", "mixed", "plain"):
        own = [event for event in launches if event[3] == mode]
        pairs = pairwise(launches)
        steps = [b[1] - a[1] for a, b in pairs if a[3] == b[3] == mode and a[4] == b[4]]
        if own:
            found[mode] = {
                "steps": len(own),
                "launch_us": median(event[2] - event[1] for event in own) * 1e6,
                "period_us": median(steps) * 1e6 if steps else None,
            }
    results = [event[2] - event[1] for event in events if event[0] == "result"]
    found["result_us"] = median(results) * 1e6 if results else None
    # Requests sit out a second step of a pair if they may have ended, so some rows may lack.
    device = [event for event in events if event[0] == "device"]
    full = [event for event in device[1:] if event[1] + event[2] == rows]
    if full:
        seconds, idle = [event[5] for event in full], [event[7] for event in full]
        found["device"] = {
            "steps": len(full),
            "step_us": median(seconds) * 1e6,
            "idle_us": median(idle) * 1e6,
            "idle_share": median(idle) / (median(idle) + median(seconds)),
            "longest_idle_us": sorted(wait * 1e6 for wait in idle)[-3:],
        }
    return found


def kernels_of(
    out: Path,
    engine: gpu_engine.Variant,
    prompts: list[list[int]],
    temperature: float = 0.0,
    wait: float = 0.35,
    tokens: int = 160,
) -> dict[str, Any]:
    """Device time of 30 steps by kernel, from ``wait`` seconds after the requests came; the trace
    stays in a folder of ``out``."""
    folder = out / f"trace-{time.time_ns()}"
    engine.generate(prompts, 1)
    steps = 30
    params = {"max_new_tokens": tokens, "temperature": temperature, "ignore_eos": True}
    engine.ask(
        "profiled", prompts=prompts, params=params, wait=wait, folder=str(folder), steps=steps
    )
    deadline = time.perf_counter() + 30
    while not (files := list(folder.rglob("*.trace.json.gz"))) and time.perf_counter() < deadline:
        time.sleep(0.5)
    time.sleep(1.0)
    if not files:
        return {"error": "no trace"}
    with gzip.open(files[0]) as stream:
        events = json.load(stream)["traceEvents"]
    kernels = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    if not kernels:
        return {"error": "no kernels"}
    # SGLang's profiler counts what it launches, which may be pairs of our steps.
    steps = max(steps, sum("_accept_greedy" in e["name"] for e in kernels))
    first = min(e["ts"] for e in kernels)
    last = max(e["ts"] + e["dur"] for e in kernels)
    total: Counter[str] = Counter()
    for event in kernels:
        total[_group(event["name"])] += event["dur"]
    return {
        "steps": steps,
        "us_per_step": (last - first) / steps,
        "busy_us_per_step": sum(total.values()) / steps,
        "kernels_per_step": len(kernels) / steps,
        "us_per_step_by_group": {k: round(v / steps, 1) for k, v in total.most_common(22)},
        "idle_us_per_step_before": {k: round(v / steps, 1) for k, v in _idle(kernels).items()},
    }


def _idle(kernels: list[dict[str, Any]]) -> dict[str, float]:
    """How long the device did nothing, by what it did next."""
    idle: Counter[str] = Counter()
    end = float("inf")
    for event in sorted(kernels, key=lambda event: event["ts"]):
        idle[event["name"][:60]] += max(0.0, event["ts"] - end)
        end = max(end if end < float("inf") else 0.0, event["ts"] + event["dur"])
    return dict(idle.most_common(8))


def host(lab: Lab) -> dict[str, Any]:
    """What the scheduler's thread does in a step, by Python's profiler, which slows it down."""
    found = {}
    for key, engine, count, temperature in _cases(lab, lab.options.temperatures[:1]):
        found[key] = _host_profile(lab, engine, lab.prompts[:count], temperature)
        lab.say(f"{key}\n{found[key]}")
    return found


def _host_profile(
    lab: Lab, engine: gpu_engine.Variant, prompts: list[list[int]], temperature: float
) -> str:
    path = lab.options.out / f"host-{time.time_ns()}.prof"
    engine.answers(prompts, 1)
    engine.ask("collective_rpc", method="probe_host", path=None)
    before = engine.counters()
    engine.answers(prompts, 96, temperature)
    engine.ask("collective_rpc", method="probe_host", path=str(path))
    steps = engine.counters().get("decode_steps", 0) - before.get("decode_steps", 0)
    text = io.StringIO()
    stats = pstats.Stats(str(path), stream=text)
    stats.sort_stats("tottime").print_stats(45)
    stats.sort_stats("cumtime").print_stats(60)
    lines = [line for line in text.getvalue().splitlines() if line.strip()]
    return f"{steps} decode steps\n" + "\n".join(line[-150:] for line in lines)


_GROUPS = (
    ("flash", "attention"),
    ("combine", "attention"),
    ("prepare_varlen", "attention schedule"),
    ("page_scores", "page scores"),
    ("select_pages", "page lists"),
    ("select_own", "page lists"),
    ("select_shared", "page lists"),
    # Lists, and tables of draft rows.
    ("refresh_tables", "page lists"),
    ("build_tables", "page tables"),
    ("layer_tables", "page tables"),
    ("nvjet", "products"),
    ("gemm", "products"),
    ("gemv", "products"),
    ("cutlass", "products"),
    ("cublas", "products"),
    ("splitK", "products"),
    ("_best_", "choose tokens"),
    ("accept", "accept"),
    ("lay_out", "layout"),
    ("rmsnorm", "norm"),
    ("norm", "norm"),
    ("rope", "rope"),
    ("rotary", "rope"),
    ("silu", "activation"),
    ("store", "KV write"),
    ("memcpy", "copies"),
    ("memset", "copies"),
)


def _group(name: str) -> str:
    lower = name.lower()
    found = next((group for part, group in _GROUPS if part.lower() in lower), None)
    return found or name[:60]
