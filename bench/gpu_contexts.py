"""Draft contexts on whole engines: rates, accept lengths and device time by group, one engine each.

A context is built into the graphs of an engine, so it takes an engine each, about 12 GB of the GPU
with 64 requests of 7,000 tokens of SmolLM2-135M and 45 GB with 256. Scenario A in one call, on an
H200 (512 tokens per draft row; ``refresh`` first, what the others are compared with):

    python bench/gpu_lab.py --model MODEL --out DIR --phases draft_contexts --requests 64 \\
        --temperatures 0.0 0.7 --start-timeout 400 --engines stock context_refresh_16 \\
        context_hybrid_1_16 context_hybrid_3_16 context_hybrid_5_16 context_hybrid_1_8 \\
        context_hybrid_3_8 context_hybrid_5_8 context_per_layer_16

``context_hybrid_3_8`` is ``hybrid`` with one list for three layers and pages of 8. With 256
requests name ``stock`` and two contexts per call. ``DIR/draft_contexts.json`` holds everything:

* ``rates``: as in the phase ``timed``, with accepted drafts per verify from the counters;
* ``steps``: device time per step by group of kernels while all requests run. ``page scores`` are
  the votes, ``page lists`` the selection, ``page tables`` their tables; ``attention`` and its
  schedule come beside them, and what the rest of the step takes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bench import gpu_engine
from bench.gpu_profile import kernels_of

if TYPE_CHECKING:
    from bench.gpu_lab import Lab

GROUPS = ("page scores", "page lists", "page tables", "attention", "attention schedule")


def draft_contexts(lab: Lab) -> dict[str, Any]:
    """Every started engine in turn, round by round."""
    options = lab.options
    found: dict[str, Any] = {}
    lab.fit_costs()
    for temperature in options.temperatures:
        for count in options.requests:
            key = f"{count} x {options.prompt_tokens}, temperature {temperature}"
            lab.say(key)
            case: dict[str, Any] = {"rates": {}, "steps": {}}
            found[key] = case
            prompts = lab.prompts[:count]
            names = list(lab.engines)
            for turn in range(options.repeats):
                # So that a slower minute meets everybody.
                first = turn % len(names)
                for name in names[first:] + names[:first]:
                    _time(lab, name, prompts, temperature, case["rates"])
            for name, entry in case["rates"].items():
                lab.say(f"  {name}: {shown(entry)}")
            lab.save("draft_contexts", found)
            for name in names:
                # Not before all run.
                wait, tokens = (0.35, 160) if count <= 64 else (0.7, 288)
                engine = lab.engines[name]
                case["steps"][name] = step = kernels_of(
                    options.out, engine, prompts, temperature, wait, tokens
                )
                groups = step.get("us_per_step_by_group", {})
                parts = {group: groups.get(group, 0.0) for group in GROUPS}
                lab.say(f"  {name}: busy {step.get('busy_us_per_step')}, {parts}")
            lab.save("draft_contexts", found)
    return found


def _time(
    lab: Lab, name: str, prompts: list[list[int]], temperature: float, rates: dict[str, Any]
) -> None:
    engine, lengths = lab.engines[name], tuple(lab.options.new_tokens)
    measured = gpu_engine.measure([engine], prompts, lengths, 1, temperature)[name]
    entry = rates.setdefault(name, {"repeats": [], "counters": {}})
    entry["repeats"] += measured["repeats"]
    for counter, value in measured.get("counters", {}).items():
        if isinstance(value, (int, float)):
            entry["counters"][counter] = entry["counters"].get(counter, 0) + value
    entry["tokens_per_verify"] = accept_length(entry["counters"])


def accept_length(counters: dict[str, float]) -> float | None:
    """Accepted drafts per verify plus the target's own token; None where nobody verified."""
    verifies = counters.get("verify_rows", 0)
    return 1 + counters.get("accepted_drafts", 0) / verifies if verifies else None


def shown(entry: dict[str, Any]) -> str:
    """Rates of all repeats, and tokens per verify."""
    rates = [round(repeat["tokens_per_s"]) for repeat in entry["repeats"]]
    steady = [repeat["steady_tokens_per_s"] for repeat in entry["repeats"]]
    length = entry["tokens_per_verify"]
    told = f"{length:.2f} tokens per verify" if length else "no verifies"
    return f"{rates}, steady {steady}, {told}"
