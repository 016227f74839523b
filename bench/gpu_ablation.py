"""What each idea is worth on a GPU: published schedules and ours, on requests that differ.

A draft context is built into the graphs of an engine, so each has an engine of its own, side by
side on one GPU; schedules are switched between rounds. A round decodes as many tokens for each of
256 requests of mixed lengths and kinds of text (``bench/gpu_texts.py``), all at once, its prompts
in the prefix cache. In one call, on an H200 (about eight minutes, two of them starts):

    python bench/gpu_lab.py --model MODEL --out DIR --phases ablation --requests 256 \\
        --mixed 500 7500 --new-tokens 32 256 --temperatures 0.0 0.7 --repeats 3 \\
        --gammas 3 5 8 12 --start-timeout 300 --engines context_refresh_16 context_hybrid_3_8 \\
        context_per_layer_16 context_last_verify_16 context_window_16 stock

First every fixed length and every constant cost ratio is tried once: the *sweep*. Then the best of
each, and all rules that choose a length themselves, run ``--repeats`` times in alternating order:
the *finals*. ``DIR/ablation.json`` holds all rounds, after each of them:

* ``tokens_per_s``: tokens of the round over its wall clock, prefill from the cache and the last
  requests that run alone included;
* ``tokens_per_s_of_device_time``: the same tokens over the time of the decode steps by device
  events, of plain steps by the host's clock. Where the host's thread is slower than the device,
  only this tells schedules apart;
* ``steady_tokens_per_s``: median of what the server logged while all requests ran;
* ``tpot_ms``: a request's latency over its tokens, 50th and 99th percentile;
* ``accept_length``, ``discarded_drafts``, ``mixed_fraction`` of the steps, verifies by draft
  length, and time per step, from the counters;
* ``cost_model_error``: predicted against measured time of steps, over buckets of tokens and KV.

So everybody starts at once, and a round ends with the slowest. In the phase ``waves`` there are
``--waves`` requests per prompt, one taking the place of another, and rates are those of the time in
which all ``--requests`` places are taken (``bench/gpu_waves.py``).
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench import gpu_engine
from bench.cost_errors import errors_by_bucket, percentile
from bench.gpu_contexts import accept_length
from bench.gpu_texts import shared_tokens
from bench.gpu_variants import CONTEXTS
from bench.gpu_waves import full_window, waves_of

if TYPE_CHECKING:
    from bench.gpu_lab import Lab

COST_RATIOS = (0.1, 0.2, 0.4)
ADAPTIVE = {
    "the paper's rule": "policy: aspire, confidence: false",
    "the paper's rule, confidence": "policy: aspire",
    "shadow price": "policy: shadow_price, confidence: false",
    "shadow price, confidence": "policy: shadow_price",
}
PARTS = {
    "one length for all": ["policy: global"],
    "feedback": ["policy: feedback"],
    "constant cost": [f"policy: constant_cost, cost_ratio: {ratio}" for ratio in COST_RATIOS],
}
"""Rules that leave something out; on the context ``refresh``."""
WAVE_LINES = (
    "stock",
    "refresh, in step",
    "refresh, staggered",
    "refresh, constant cost",
    "refresh, the paper's rule",
    "refresh, shadow price",
)
PRIOR = ("window, in step", "last verify per layer, in step", "last verify per layer, staggered")
"""As published: MagicDec; Vegas and SparseSpec without mixing; SparseSpec."""


@dataclass
class Row:
    """A line of the table: a schedule on a context, with the settings that it is tried with.

    Attributes:
        name: of the line.
        engine: that runs it.
        settings: configurations; of several the best is quoted.
        sweep: one round for each of the settings.
        finals: rounds of the best one.
    """

    name: str
    engine: str
    settings: list[str]
    sweep: list[dict[str, Any]] = field(default_factory=list)
    finals: list[dict[str, Any]] = field(default_factory=list)

    def best(self) -> str:
        """The settings whose round of the sweep was the fastest: by device time, which scatters
        less than the clock."""
        if len(self.settings) == 1:
            return self.settings[0]
        kinds = ("tokens_per_s_of_device_time", "tokens_per_s")
        best = max(self.sweep, key=lambda entry: tuple(entry[kind] or 0.0 for kind in kinds))
        return str(best["settings"])

    def as_dict(self) -> dict[str, Any]:
        return {"engine": self.engine, "sweep": self.sweep, "finals": self.finals}


def label(engine: str) -> str:
    """What a context is called in the table."""
    kind, _, size = engine.removeprefix("context_").rpartition("_")
    if kind.startswith("hybrid_"):
        return f"hybrid, {kind.removeprefix('hybrid_')} layers a list, pages of {size}"
    name = "last verify per layer" if kind == "per_layer" else kind.replace("_", " ")
    return name if size == "16" else f"{name}, pages of {size}"


def rows(
    engines: Sequence[str],
    gammas: Sequence[int],
    greedy: bool,
    rules: Sequence[str] = (),
    wanted: Sequence[str] = (),
) -> list[Row]:
    """Lines for the engines there are.

    Args:
        engines: names from ``CONTEXTS``, and ``stock``.
        gammas: fixed lengths to try.
        greedy: whether drafts have confidences that may end them.
        rules: adaptive rules to try, by the beginning of their names; all, if empty.
        wanted: lines to keep, by the beginning of their names; all, if empty.
    """
    found = []
    for engine in engines:
        if engine not in CONTEXTS:
            found.append(Row("stock", engine, [""]))
            continue
        name = label(engine)

        def add(what: str, schedulers: Sequence[str], name: str = name, at: str = engine) -> None:
            texts = [
                f"{{context: {{{CONTEXTS[at]}}}, scheduler: {{{scheduler}}}}}"
                for scheduler in schedulers
            ]
            found.append(Row(f"{name}, {what}", at, texts))

        for policy, what in (("fixed", "in step"), ("staggered", "staggered")):
            add(what, [f"policy: {policy}, gamma: {gamma}" for gamma in gammas])
        for what, scheduler in ADAPTIVE.items():
            # What confidence is worth is asked on two contexts only.
            both = name.startswith(("refresh", "hybrid"))
            if rules and not what.startswith(tuple(rules)):
                continue
            if (greedy and both) or greedy == what.endswith("confidence"):
                add(what, [scheduler])
        if engine == "context_refresh_16":
            for what, schedulers in PARTS.items():
                add(what, schedulers)
            add("plain decoding", ["policy: ar"])
    return [row for row in found if not wanted or row.name.startswith(tuple(wanted))]


def ablation(lab: Lab) -> dict[str, Any]:
    """Sweep and finals at every temperature, all at once; then the error of the cost model."""
    found = _prepared(lab, 1)
    _tables(lab, "ablation", found)
    prompts = lab.prompts[: max(lab.options.requests)]
    errors: dict[str, Any] = {}
    found["cost_model_error"] = errors
    for name in [name for name in lab.engines if name in CONTEXTS][:2]:
        errors[label(name)] = cost_error(lab, name, prompts)
        lab.say(f"cost model, {name}: {errors[label(name)]}")
    return found


def waves(lab: Lab) -> dict[str, Any]:
    """Sweep and finals of the default context's schedules, requests following one another."""
    found = _prepared(lab, lab.options.waves)
    _tables(lab, "waves", found, WAVE_LINES)
    return found


def _prepared(lab: Lab, waves: int) -> dict[str, Any]:
    """Step costs measured, prompts in the prefix cache; what the runs are about."""
    options = lab.options
    prompts = lab.prompts[: max(options.requests)]
    lengths = [len(prompt) for prompt in prompts]
    found: dict[str, Any] = {
        "prompts": {
            "requests": len(prompts),
            "tokens": sum(lengths),
            "least_mean_most": [min(lengths), sum(lengths) / len(lengths), max(lengths)],
            "shared_tokens": shared_tokens(prompts),
        },
        "new_tokens": options.new_tokens[1],
        "waves": waves,
    }
    lab.fit_costs()
    for name, engine in lab.engines.items():
        engine.answers(prompts, 1)
        # Compiles and caches what only a full batch needs.
        engine.answers(prompts, options.new_tokens[0])
        lab.say(f"{name} is warm")
    return found


def _tables(lab: Lab, phase: str, found: dict[str, Any], wanted: Sequence[str] = ()) -> None:
    for temperature in lab.options.temperatures:
        table: dict[str, Any] = {}
        found[f"temperature {temperature}"] = table
        lines = rows(
            list(lab.engines), lab.options.gammas, temperature == 0.0, lab.options.rules, wanted
        )
        _measure(lab, lines, temperature, table, lambda: lab.save(phase, found), found["waves"])
        for kind in ("tokens_per_s", "tokens_per_s_of_device_time"):
            lab.say(kind)
            for text in summary(table, kind):
                lab.say(text)
        lab.save(phase, found)


def _measure(
    lab: Lab,
    lines: list[Row],
    temperature: float,
    table: dict[str, Any],
    save: Callable[[], None],
    waves: int,
) -> None:
    options, prompts = lab.options, lab.prompts[: max(lab.options.requests)]
    cells = [(row, text) for row in lines if len(row.settings) > 1 for text in row.settings]
    # In random order, so that a slower minute meets everybody.
    random.Random(3).shuffle(cells)
    for row, text in cells:
        if lab.late():
            break
        row.sweep.append(one_round(lab, row.engine, text, prompts, temperature, waves))
        table[row.name] = row.as_dict()
    save()
    for repeat in range(options.repeats):
        turn = lines[repeat * 5 % len(lines) :] + lines[: repeat * 5 % len(lines)]
        for row in turn[:: 1 if repeat % 2 == 0 else -1]:
            if lab.late() or (len(row.settings) > 1 and not row.sweep):
                continue
            entry = one_round(lab, row.engine, row.best(), prompts, temperature, waves)
            row.finals.append(entry)
            table[row.name] = row.as_dict()
            lab.say(
                f"{row.name}: {entry['tokens_per_s']:,.0f}, steady {entry['steady_tokens_per_s']}, "
                f"{entry['accept_length'] or 0:.2f} tokens per verify"
            )
        save()


def one_round(
    lab: Lab, name: str, text: str, prompts: list[list[int]], temperature: float, waves: int = 1
) -> dict[str, Any]:
    """All prompts at once, with the given settings; or ``waves`` of them, one after another.

    Raises:
        ValueError: the settings were not taken.
    """
    engine, new = lab.engines[name], lab.options.new_tokens[1]
    if text and not engine.ask("configure", text=text):
        raise ValueError(f"settings {text} were not taken")
    before = engine.counters()
    if waves > 1:
        asked = waves_of(prompts, waves, new)
        return {
            "settings": text,
            **_wave_round(lab, name, asked, len(prompts), temperature, before),
        }
    logged = engine.log.stat().st_size
    start = time.perf_counter()
    answers = engine.answers(prompts, new, temperature)
    seconds = time.perf_counter() - start
    counters = gpu_engine._difference(before, engine.counters())
    full = engine.full_rates(len(prompts), logged)
    latencies = sorted(answer["meta_info"]["e2e_latency"] / new * 1e3 for answer in answers)
    busy = counters.get("decode_microseconds", 0)
    return {
        "settings": text,
        "seconds": seconds,
        "tokens_per_s": len(prompts) * new / seconds,
        "tokens_per_s_of_device_time": len(prompts) * new / busy * 1e6 if busy else None,
        "steady_tokens_per_s": statistics.median(full) if full else None,
        "tpot_ms": {f"p{share}": percentile(latencies, share) for share in (50, 99)},
        **_counted(counters),
    }


def _counted(counters: dict[str, Any]) -> dict[str, Any]:
    steps, busy = counters.get("decode_steps", 0), counters.get("decode_microseconds", 0)
    return {
        "accept_length": accept_length(counters),
        "discarded_drafts": counters.get("discarded_drafts", 0),
        "accepted_drafts": counters.get("accepted_drafts", 0),
        "steps": steps,
        "plain_steps": counters.get("plain_graph_steps", 0),
        "mixed_fraction": counters.get("mixed_steps", 0) / steps if steps else 0.0,
        "us_per_step": busy / steps if steps else None,
        "verifies_by_drafts": counters.get("draft_lengths", {}),
        "cost_model": counters.get("cost_model"),
    }


def _wave_round(
    lab: Lab,
    name: str,
    asked: tuple[list[list[int]], list[int]],
    places: int,
    temperature: float,
    before: dict[str, Any],
) -> dict[str, Any]:
    """More requests than run at a time; ``asked``: their prompts and output lengths."""
    engine, path = lab.engines[name], Path(lab.options.out) / "timeline.json"
    prompts, lengths = asked
    params = [
        {"max_new_tokens": new, "temperature": temperature, "ignore_eos": True} for new in lengths
    ]
    engine.ask("collective_rpc", method="probe_timeline", path=None)
    start = time.perf_counter()
    engine.ask("generate", input_ids=prompts, sampling_params=params)
    seconds = time.perf_counter() - start
    engine.ask("collective_rpc", method="probe_timeline", path=str(path))
    window = full_window(json.loads(path.read_text()), places)
    return {
        "seconds": seconds,
        "tokens_per_s": window["tokens_per_s"],
        "tokens_per_s_of_device_time": window["tokens_per_s_of_device_time"],
        "steady_tokens_per_s": None,
        "window": window,
        **_counted(gpu_engine._difference(before, engine.counters())),
    }


def rate_of(line: dict[str, Any], kind: str = "tokens_per_s") -> float | None:
    """Median of the finals; None without any."""
    rates = [entry[kind] for entry in line["finals"] if entry[kind]]
    return statistics.median(rates) if rates else None


def summary(table: dict[str, Any], kind: str = "tokens_per_s") -> list[str]:
    """A line per row, with its rate over that of plain decoding; then what was asked for: our best
    rule over the best fixed length on the same context, and over the best of prior work."""
    rates = {name: rate for name, line in table.items() if (rate := rate_of(line, kind))}
    plain = rates.get("refresh, plain decoding") or rates.get("stock")
    texts = []
    for name, rate in rates.items():
        finals = [entry[kind] for entry in table[name]["finals"]]
        text = f"{name}: {rate:,.0f} ({min(finals):,.0f} to {max(finals):,.0f})"
        texts.append(text + (f", {rate / plain:.3f} of plain" if plain else ""))
    ours = {name: rate for name, rate in rates.items() if name.endswith(tuple(ADAPTIVE))}
    for name, rate in ours.items():
        context = next(name[: -len(what) - 2] for what in ADAPTIVE if name.endswith(what))
        fixed = [rates.get(f"{context}, {what}") for what in ("in step", "staggered")]
        if known := [other for other in fixed if other]:
            texts.append(f"{name} over the best fixed length: {rate / max(known):.3f}")
    prior = [rates[name] for name in PRIOR if name in rates]
    if prior and ours:
        texts.append(f"our best over the best of prior work: {max(ours.values()) / max(prior):.3f}")
    return texts


def cost_error(lab: Lab, name: str, prompts: list[list[int]]) -> dict[str, Any]:
    """How far predicted step times are from those measured on the device, default schedule."""
    engine = lab.engines[name]
    engine.ask("configure", text=f"{{context: {{{CONTEXTS[name]}}}}}")
    path = Path(lab.options.out) / f"steps-{name}.json"
    engine.ask("collective_rpc", method="probe_timeline", path=None)
    engine.answers(prompts, lab.options.new_tokens[1])
    engine.ask("collective_rpc", method="probe_timeline", path=str(path))
    return errors_by_bucket(json.loads(path.read_text()))
