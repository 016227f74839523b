"""Several measurements on engines that are started once: starting one takes a minute or two.

``python bench/gpu_lab.py --model MODEL --out DIR --engines stock aspire overlap --phases texts kv``
starts the engines of ``bench/gpu_engine.py`` side by side, runs the phases in order, and writes
``DIR/NAME.json`` after each. Timed phases run one engine at a time, the others idle.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import gpu_ablation, gpu_engine, gpu_exact, gpu_variants
from bench.gpu_contexts import draft_contexts
from bench.gpu_profile import host, profile, timeline
from bench.gpu_ranks import killed_rank, ranks
from bench.gpu_texts import mixed_lengths, mixed_prompts

NEW_TOKENS = 96


class Lab:
    """Engines by name, prompts, and where results go."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.start = time.perf_counter()
        out: Path = options.out
        out.mkdir(parents=True, exist_ok=True)
        count = max(options.requests)
        mixed = mixed_lengths(count, *options.mixed) if options.mixed else None
        tokens = sum(mixed) if mixed else count * options.prompt_tokens
        room = tokens + count * (options.new_tokens[1] + 200)
        extra = gpu_variants.engine_arguments(options.tp_size)
        self.engines = {
            name: gpu_engine.Variant(name, options.model, room, out, extra)
            for name in options.engines
        }
        if mixed:
            self.prompts = mixed_prompts(options.model, mixed)
        else:
            count = max(count, 64)
            self.prompts = gpu_engine.load_prompts(options.model, count, options.prompt_tokens)
        self.environment = gpu_engine._environment(options.commit)
        self.host_before = host_state()
        for name, engine in self.engines.items():
            left = options.start_timeout - (time.perf_counter() - self.start)
            self.say(f"{name}: {engine.receive(max(left, 1.0))}")
        self.engines = {name: engine for name, engine in self.engines.items() if engine.alive}

    def say(self, text: str) -> None:
        print(f"[{time.perf_counter() - self.start:5.0f} s] {text}", flush=True)

    def late(self) -> bool:
        """Whether no further round should begin."""
        return time.perf_counter() - self.start > self.options.last_round

    def fit_costs(self) -> None:
        """Let every engine measure step costs anew, one after the other: engines that start side
        by side disturb each other's profiles."""
        for name in self.speculative():
            self.engines[name].ask("flush_cache")
            self.engines[name].ask("collective_rpc", method="probe_costs")
            self.say(f"{name}: {self.engines[name].counters().get('cost_model')}")

    def save(self, phase: str, result: Any) -> None:
        content = {
            "command": " ".join(["python", *sys.argv]),
            "environment": self.environment,
            "host": {"before": self.host_before, "after": host_state()},
            phase: result,
        }
        (self.options.out / f"{phase}.json").write_text(json.dumps(content, indent=1))

    def speculative(self) -> dict[str, gpu_engine.Variant]:
        return {n: e for n, e in self.engines.items() if not n.startswith("stock") and n != "plain"}

    def serving(self, name: str) -> gpu_engine.Variant | None:
        """The engine of this name, or the one of ASPIRE with settings of this name; None if it was
        not started.

        Raises:
            ValueError: the settings were not taken.
        """
        if name in ("stock", "plain"):
            return self.engines.get(name)
        engine = self.engines.get("aspire")
        if name.startswith("reads_all "):
            name = name.removeprefix("reads_all ")
            engine = self.engines.get("reads_all")
        if engine and not engine.ask("configure", text=gpu_variants.SETTINGS.get(name, name)):
            raise ValueError(f"settings {name} were not taken")
        if engine:
            steps = gpu_variants.BURSTS.get(name)
            engine.ask("collective_rpc", method="probe_bursts", steps=steps)
        return engine

    def mixed_lengths(self, count: int) -> list[list[int]]:
        """Prompts of 500 to 6,200 tokens."""
        step = 5700 // max(count - 1, 1)
        return [self.prompts[i][: 500 + step * i] for i in range(count)]


def host_state() -> dict[str, Any]:
    """How busy the host is: load averages, and seconds that its cores ran or were taken away."""
    times = psutil.cpu_times()
    return {
        "load_average": os.getloadavg(),
        "busy_s": times.user + times.system,
        "stolen_s": getattr(times, "steal", 0.0),
        "clock_s": time.time(),
    }


def texts(lab: Lab) -> dict[str, Any]:
    """Greedy texts against stock, their scores by stock, and the KV they left."""
    stock, count = lab.engines["stock"], 16
    prompts, folder = lab.mixed_lengths(count), lab.options.out
    asked = stock.answers(prompts, NEW_TOKENS, return_logprob=True, top_logprobs_num=2)
    gpu_exact.save_kv(stock, prompts, asked, folder / "stock.kv")
    plain = gpu_exact.score(stock, prompts, asked)
    gpu_exact.save_kv(stock, prompts, asked, folder / "reference.kv")
    found: dict[str, Any] = {
        "stock": {
            "gaps": plain,
            "kv": gpu_exact.kv_errors(folder / "stock.kv", folder / "reference.kv"),
        }
    }
    lab.say(f"stock: gaps up to {max(plain):.3f}, kv {found['stock']['kv']['median_p99_max']}")
    references = {"stock": asked}
    for name in lab.engines:
        if name.startswith("stock_"):
            references[name] = lab.engines[name].answers(
                prompts, NEW_TOKENS, return_logprob=True, top_logprobs_num=2
            )
            found[name] = gpu_exact.compare_texts(references[name], asked)
            lab.say(f"{name}: {found[name]['same']} of {count} like stock")
    for name, engine in lab.speculative().items():
        before = engine.counters()
        answers = engine.answers(prompts, NEW_TOKENS)
        counters = gpu_engine._difference(before, engine.counters())
        own = references.get(f"stock_{name.removesuffix('_tiny')}", asked)
        entry = gpu_exact.compare_texts(answers, own)
        entry["counters"] = counters
        gpu_exact.save_kv(engine, prompts, answers, folder / f"{name}.kv")
        entry["gaps"] = gpu_exact.score(stock, prompts, answers)
        gpu_exact.save_kv(stock, prompts, answers, folder / "reference.kv")
        entry["kv"] = gpu_exact.kv_errors(folder / f"{name}.kv", folder / "reference.kv")
        again = engine.answers(prompts, NEW_TOKENS)
        entry["repeat_same"] = sum(
            a["output_ids"] == b["output_ids"] for a, b in zip(answers, again, strict=True)
        )
        found[name] = entry
        lab.say(
            f"{name}: {entry['same']} of {count} same, worst gap {entry['worst_gap']}, scored "
            f"{max(entry['gaps']):.3f}, kv {entry['kv']['median_p99_max']}, again "
            f"{entry['repeat_same']}, accepted {counters.get('accepted_drafts')} of "
            f"{counters.get('draft_rows')}, graph {counters.get('graph_steps')}, eager "
            f"{counters.get('eager_steps')}, splits "
            f"{[(s['text'], s.get('at'), s['gap']) for s in entry['splits']]}"
        )
    return found


def scores(lab: Lab) -> dict[str, Any]:
    """Rule I5 on 64 prompts: stock judges stock's texts and ASPIRE's."""
    stock, prompts = lab.engines["stock"], lab.mixed_lengths(64)
    asked = stock.answers(prompts, NEW_TOKENS, return_logprob=True, top_logprobs_num=2)
    plain = gpu_exact.score(stock, prompts, asked)
    tau = gpu_exact.allowed_gap(plain)
    found: dict[str, Any] = {"tau": tau, "stock": {"gaps": plain}}
    lab.say(f"tau {tau:.3f} from stock's {max(plain):.3f}")
    for name in lab.options.scored:
        engine = lab.engines[name]
        answers = engine.answers(prompts, NEW_TOKENS)
        entry = gpu_exact.compare_texts(answers, asked)
        entry["gaps"] = gpu_exact.score(stock, prompts, answers)
        entry["consistent"] = sum(gap <= tau for gap in entry["gaps"])
        found[name] = entry
        lab.say(
            f"{name}: {entry['consistent']} of 64 within tau (worst {max(entry['gaps']):.3f}), "
            f"{entry['same']} same, worst gap at a split {entry['worst_gap']}"
        )
    return found


def distributions(lab: Lab) -> dict[str, Any]:
    """Sampled tokens at temperature 1 against exact probabilities, filtered ones against stock."""
    stock, prompt = lab.engines.get("stock_half") or lab.engines["stock"], lab.prompts[3][:2000]
    filtered = {"temperature": 1.2, "top_p": 0.9, "top_k": 20}
    theirs = gpu_exact.sampled(stock, prompt, 4000, filtered)
    plain = gpu_exact.sampled(stock, prompt, 6000, {"temperature": 1.0})
    found: dict[str, Any] = {"stock": {"exact": gpu_exact.chi_square(stock, prompt, plain)}}
    lab.say(f"stock: {found['stock']}")
    for name in lab.options.sampled:
        engine = lab.engines[name]
        before = engine.counters()
        tokens = gpu_exact.sampled(engine, prompt, 6000, {"temperature": 1.0})
        found[name] = {
            "exact": gpu_exact.chi_square(stock, prompt, tokens),
            "filtered": gpu_exact.two_samples(
                gpu_exact.sampled(engine, prompt, 4000, filtered), theirs
            ),
            "counters": gpu_engine._difference(before, engine.counters()),
        }
        shown = {k: v for k, v in found[name].items() if k != "counters"}
        accepted = found[name]["counters"].get("accepted_drafts")
        lab.say(
            f"{name}: accepted {accepted} {found[name]['counters'].get('discarded_drafts')} {shown}"
        )
    return found


def timed(lab: Lab) -> dict[str, Any]:
    """Decode rates of stock and of each setting of ASPIRE, in turn."""
    found: dict[str, Any] = {}
    options = lab.options
    for temperature in options.temperatures:
        for count in options.requests:
            key = f"{count} x {options.prompt_tokens}, temperature {temperature}"
            lab.say(key)
            found[key] = _rates(lab, lab.prompts[:count], temperature, options.repeats)
            lab.save("timed", found)
    return found


def _rates(
    lab: Lab, prompts: list[list[int]], temperature: float, repeats: int, settings: Any = None
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    names = ["stock", *(settings or lab.options.settings)]
    # Round by round, so that a slower minute of the machine meets everybody, each round beginning
    # with another engine.
    rounds = [names[i % len(names) :] + names[: i % len(names)] for i in range(repeats)]
    for name in itertools.chain(*rounds):
        engine = lab.serving(name)
        if engine is None:
            continue
        measured = gpu_engine.measure(
            [engine], prompts, tuple(lab.options.new_tokens), 1, temperature
        )[engine.name]
        entry = found.setdefault(name, {"repeats": [], "counters": {}})
        entry["repeats"] += measured["repeats"]
        entry["counters"] = measured.get("counters")
    for name, measured in found.items():
        rates = [round(r["tokens_per_s"]) for r in measured["repeats"]]
        steady = [r["steady_tokens_per_s"] for r in measured["repeats"]]
        wall = [round(r["seconds"][1], 3) for r in measured["repeats"]]
        counters = dict(measured.get("counters") or {})
        steps = counters.get("decode_steps", 0)
        per_step = counters.get("decode_microseconds", 0) / steps if steps else 0
        cost = {k: float(f"{v:.4g}") for k, v in (counters.pop("cost_model", None) or {}).items()}
        lab.say(
            f"  {name}: {rates}, steady {steady}, wall {wall}; us/step {per_step:.0f}; {counters}; "
            f"{cost}"
        )
    return found


def short(lab: Lab) -> dict[str, Any]:
    """Scenario C: short contexts, where plain decoding is the right choice; and plain decoding on
    ASPIRE's backend, also with long ones."""
    found = {}
    for count, rounds in zip((64, 1), lab.options.short_repeats, strict=True):
        prompts = [prompt[:512] for prompt in lab.prompts[:count]]
        lab.say(f"{count} x 512")
        found[f"{count} x 512"] = _rates(lab, prompts, 0.0, rounds, ["default", "plain"])
        lab.save("short", found)
    if "plain" in lab.engines and "plain" not in lab.options.settings:
        lab.say("64 x 7000")
        found["64 x 7000"] = _rates(lab, lab.prompts[:64], 0.0, 2, ["plain"])
    return found


def arrivals(lab: Lab) -> dict[str, Any]:
    """Scenario D: prompts of mixed lengths that arrive one after another."""
    count, new = 192, 192
    prompts = [lab.prompts[i % len(lab.prompts)][: 500 + (i * 1237) % 6000] for i in range(count)]
    delays = [0.02 * i for i in range(count)]
    params = {"max_new_tokens": new, "temperature": 0.0, "ignore_eos": True}
    found: dict[str, Any] = {}
    for name in ("stock", *lab.options.settings):
        engine = lab.serving(name)
        assert engine is not None
        engine.generate(prompts, 1)
        runs = []
        for _ in range(2):
            start = time.perf_counter()
            latencies = engine.ask("arrivals", prompts=prompts, delays=delays, params=params)
            seconds = time.perf_counter() - start
            runs.append(
                {
                    "seconds": seconds,
                    "tokens_per_s": count * new / seconds,
                    "mean_latency": sum(latencies) / count,
                }
            )
        found[name] = runs
        lab.say(f"  {name}: {runs}")
    return found


PHASES = {
    phase.__name__: phase
    for phase in (
        *(texts, scores, distributions, timed, short, arrivals, profile, host, timeline),
        *(ranks, killed_rank, draft_contexts, gpu_ablation.ablation, gpu_ablation.waves),
    )
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--engines", nargs="+", required=True, choices=gpu_engine.VARIANTS)
    parser.add_argument("--tp-size", type=int, default=1)
    parser.add_argument("--phases", nargs="+", required=True, choices=PHASES)
    parser.add_argument("--scored", nargs="*", default=["overlap"])
    parser.add_argument("--sampled", nargs="*", default=["overlap"])
    parser.add_argument("--settings", nargs="+", default=["default", "staggered"])
    parser.add_argument("--requests", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--prompt-tokens", type=int, default=7000)
    parser.add_argument(
        "--mixed",
        type=int,
        nargs=2,
        metavar=("LEAST", "MOST"),
        help="prompts of mixed lengths and kinds, for as many requests as the most of --requests",
    )
    parser.add_argument("--gammas", type=int, nargs="+", default=[3, 5, 8, 12])
    parser.add_argument(
        "--waves", type=int, default=2, help="requests per prompt, one after another; phase waves"
    )
    parser.add_argument("--rules", nargs="*", default=(), choices=gpu_ablation.ADAPTIVE)
    parser.add_argument(
        "--last-round",
        type=float,
        default=math.inf,
        help="seconds from the start; ablation and waves",
    )
    parser.add_argument("--new-tokens", type=int, nargs=2, default=(32, 288))
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument(
        "--short-repeats", type=int, nargs=2, default=(3, 3), help="with 64 requests and with one"
    )
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7])
    parser.add_argument("--start-timeout", type=float, default=240.0)
    parser.add_argument("--commit", default=None)
    lab = Lab(parser.parse_args())
    for name in lab.options.phases:
        lab.say(f"== {name}")
        lab.host_before = host_state()
        try:
            lab.save(name, PHASES[name](lab))
        except Exception:
            # One fault must not cost the phases after it: the device is lent by the minute.
            traceback.print_exc()
    for engine in lab.engines.values():
        engine.process.kill()
    lab.say("done")
    return 0


if __name__ == "__main__":
    # Engines start processes of their own, which outlive a killed parent unless told otherwise.
    code = main()
    sys.stdout.flush()
    os._exit(code)
