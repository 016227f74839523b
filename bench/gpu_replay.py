"""A large model's shape on one GPU or two: random weights and KV, acceptance replayed.

``python bench/gpu_replay.py --out DIR`` starts stock SGLang with fa3, then ASPIRE, with the shape
of Qwen3-8B, and decodes 24 requests of 30,000 tokens. Random weights say nothing about acceptance,
so drafts are accepted at given rates instead, each draft by itself. What it says: what steps of
such a size cost as whole engines, and how the scheduler turns a rate into throughput.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import time
import traceback
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import gpu_engine
from bench.gpu_profile import kernels_of
from bench.gpu_variants import SETTINGS, engine_arguments

QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}
# Two bytes each: keys and values of all layers per token, and all weights but the embedding table.
KV_BYTES = 2 * 36 * 8 * 128 * 2
WEIGHT_BYTES = 2 * (36 * (4096 * 128 * 48 + 4096 * 4096 + 3 * 4096 * 12288) + 4096 * 151936)


def random_prompts(count: int, length: int) -> list[list[int]]:
    """Token ids that share no prefix."""
    import random

    return [random.Random(i).choices(range(1000, 150_000), k=length) for i in range(count)]


def started(name: str, options: argparse.Namespace, model: Path, prompts: list[list[int]]) -> Any:
    room = len(prompts) * (options.prompt_tokens + 900)
    extra = engine_arguments(options.tp_size, options.first_gpu)
    engine = gpu_engine.Variant(name, str(model), room, options.out, extra)
    ready = engine.receive(options.start_timeout)
    if ready is None:
        raise RuntimeError(f"{name} did not start")
    print(f"{name}: {ready}", flush=True)
    engine.ask("collective_rpc", method="probe_fill", texts=prompts)
    return engine


def rate_of(engine: Any, prompts: list[list[int]], lengths: tuple[int, int]) -> dict[str, Any]:
    """Tokens per second between two lengths, and while all requests ran."""
    short, long = lengths
    engine.answers(prompts, 8)
    first = engine.generate(prompts, short)
    before, start = engine.counters(), engine.log.stat().st_size
    second = engine.generate(prompts, long)
    full = engine.full_rates(len(prompts), start)
    seconds = second[1] - first[1]
    return {
        "seconds": [first[1], second[1]],
        "tokens_per_s": len(prompts) * (long - short) / seconds,
        "steady_tokens_per_s": statistics.median(full) if full else None,
        "counters": gpu_engine._difference(before, engine.counters()),
    }


def steps_of(engine: Any, prompts: list[list[int]], tokens: int, out: Path) -> list[list[Any]]:
    """The scheduler's timeline of one run."""
    path = out / f"timeline-{time.time_ns()}.json"
    engine.ask("collective_rpc", method="probe_timeline", path=None)
    engine.answers(prompts, tokens)
    engine.ask("collective_rpc", method="probe_timeline", path=str(path))
    events: list[list[Any]] = json.loads(path.read_text())
    path.unlink()
    return events


def launches(events: list[list[Any]], rows: int) -> list[float]:
    """Seconds from each decode launch of the full batch to the next."""
    found = [e for e in events if e[0] == "launch"]
    pairs = itertools.pairwise(found)
    return [b[1] - a[1] for a, b in pairs if a[3] != "prefill" != b[3] and a[4] == b[4] == rows]


def device_steps(events: list[list[Any]]) -> dict[str, Any]:
    """Steps by the rows that verified: how many, milliseconds on the device, as predicted, and
    what the device did nothing before them."""
    found: dict[str, list[list[Any]]] = {}
    for event in events:
        if event[0] == "device":
            _, drafts, verifies, *times = event
            found.setdefault(f"{drafts} draft, {verifies} verify", []).append(times)
    names = ("tokens", "kv_tokens", "ms", "predicted_ms", "idle_ms")
    scale = (1.0, 1.0, 1e3, 1e3, 1e3)

    def means(group: list[list[Any]]) -> dict[str, float]:
        columns = zip(*group, strict=True)
        values = [statistics.mean(c) * s for c, s in zip(columns, scale, strict=True)]
        return {"steps": len(group)} | dict(zip(names, values, strict=True))

    common = sorted(found.items(), key=lambda item: -len(item[1]))[:14]
    everything = [times for group in found.values() for times in group]
    return {key: means(group) for key, group in [("all", everything), *common] if group}


def measure(options: argparse.Namespace, model: Path, save: Any) -> None:
    count, lengths = options.requests, tuple(options.new_tokens)
    prompts = random_prompts(count, options.prompt_tokens)
    found: dict[str, Any] = {}
    if options.stock:
        earlier = json.loads(options.stock.read_text())
        found = {key: earlier["replay"][key] for key in ("stock", "plain_step_s")}
        found["stock_measured_at"] = earlier["environment"]["commit"]
    elif "stock" in options.parts:
        stock = started("stock_8b", options, model, prompts)
        found["stock"] = rate_of(stock, prompts, lengths)
        steps = launches(steps_of(stock, prompts, 64, options.out), count)
        found["plain_step_s"] = statistics.median(steps)
        stock.process.kill()
        time.sleep(3.0)
    plain = found.get("plain_step_s")
    read = KV_BYTES * count * (options.prompt_tokens + lengths[1] / 2) + WEIGHT_BYTES
    # Each GPU reads its own heads and columns.
    read /= options.tp_size
    found["plain_step_bytes"] = read
    found["plain_step_floor_s"] = {"4.8 TB/s": read / 4.8e12, "3.9 TB/s (measured)": read / 3.9e12}
    print(found, flush=True)
    save(found)
    if "aspire" not in options.parts:
        return
    aspire = started("replay_8b", options, model, prompts)
    aspire.ask("configure", text="{scheduler: {policy: fixed, gamma: 8}}")
    aspire.ask("collective_rpc", method="probe_replay", rate=0.9)
    aspire.answers(prompts, 40)
    events = [e for e in steps_of(aspire, prompts, 200, options.out) if e[0] == "step"]
    drafts = [e[4] for e in events if e[1] == count and e[2] == 0]
    verifies = [e[4] for e in events if e[2] == count and e[3] == 9 * count]
    found["draft_step_s"] = statistics.median(drafts)
    found["verify_step_s"] = statistics.median(verifies)
    if plain is not None:
        found["draft_over_plain"] = found["draft_step_s"] / plain
        found["verify_over_plain"] = found["verify_step_s"] / plain
    print({k: v for k, v in found.items() if k != "stock"}, flush=True)
    save(found)
    if options.trace:
        aspire.ask("configure", text="{scheduler: {policy: fixed, gamma: 16}}")
        key = "device time of 30 steps, nearly all of drafts alone"
        found[key] = kernels_of(options.out, aspire, prompts)
        print(key, found[key], flush=True)
        save(found)
    for name in options.settings:
        aspire.ask("configure", text=SETTINGS[name])
        for rate in options.rates:
            aspire.ask("collective_rpc", method="probe_replay", rate=rate)
            key = f"{name}, replayed acceptance {rate}"
            found[key] = rate_of(aspire, prompts, lengths)
            base, ours = found.get("stock", {}), found[key]
            for kind in ("", "steady_"):
                theirs, mine = base.get(f"{kind}tokens_per_s"), ours[f"{kind}tokens_per_s"]
                if theirs and mine:
                    ours[f"{kind}over_stock"] = mine / theirs
            print(key, {k: v for k, v in ours.items() if k != "counters"}, flush=True)
            print("   ", ours["counters"], flush=True)
            if name == options.settings[0]:
                ours["steps"] = device_steps(steps_of(aspire, prompts, 128, options.out))
                for step, times in ours["steps"].items():
                    print("      ", step, {k: round(v, 3) for k, v in times.items()}, flush=True)
            save(found)
    aspire.process.kill()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--prompt-tokens", type=int, default=30_000)
    parser.add_argument("--new-tokens", type=int, nargs=2, default=(32, 544))
    parser.add_argument("--rates", type=float, nargs="+", default=[0.8, 0.9, 0.95])
    parser.add_argument("--settings", nargs="+", default=["default", "staggered"])
    parser.add_argument("--start-timeout", type=float, default=240.0)
    parser.add_argument("--parts", nargs="+", default=["stock", "aspire"])
    parser.add_argument("--tp-size", type=int, default=1)
    parser.add_argument("--first-gpu", type=int, default=0)
    parser.add_argument("--trace", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--stock", type=Path, help="an earlier result, to take stock's part from")
    parser.add_argument("--commit", default=None)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    model = options.out / "qwen3-8b-shape"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(QWEN3_8B))
    head = {
        "command": " ".join(["python", *(Path(a).name if "/" in a else a for a in sys.argv)]),
        "environment": gpu_engine._environment(options.commit),
        "about": "shape of Qwen3-8B, random weights, random KV that was not computed by a prefill; "
        "acceptance replayed: each draft is accepted at the given rate",
    }

    def save(found: dict[str, Any]) -> None:
        (options.out / "replay.json").write_text(json.dumps({**head, "replay": found}, indent=1))

    try:
        measure(options, model, save)
    except Exception:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    # Engines start processes of their own, which outlive a killed parent unless told otherwise.
    code = main()
    sys.stdout.flush()
    os._exit(code)
