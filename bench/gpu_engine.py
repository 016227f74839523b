"""Whole engines on one GPU: stock SGLang with fa3 against ASPIRE, on the same real prompts.

``python bench/gpu_engine.py --out DIR`` starts every variant in a process of its own, checks their
greedy texts against each other, then times decoding, variant after variant in turn, and writes
``DIR/gpu_engine.json``. Prompts are prefilled into the radix cache before they are timed; the rate
is that of the difference of two runs of different length, so neither prefill nor the ends of a run
count.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import statistics
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import gpu_probe, gpu_requests
from bench.gpu_variants import VARIANTS

DECODE_LINE = re.compile(
    r"Decode batch, #running-req: (\d+),.*gen throughput \(token/s\): ([\d.]+)"
)


def serve(
    name: str, model: str, room: int, log: str, pipe: Any, extra: dict[str, Any] | None = None
) -> None:
    """One engine; answers requests ``(method, arguments)`` until None comes.

    Args:
        extra: arguments of all engines of a run, which those of the variant come before.
    """
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    arguments, config, environment = VARIANTS[name]
    # Through a file, so that the settings can change while the engine runs.
    file = Path(f"{log}.yaml")
    file.write_text(config)
    os.environ.update(environment, ASPIRE_CONFIG=str(file))
    if (extra or {}).get("tp_size", 1) > 1:
        os.environ["PROBE_TENSOR_PARALLEL"] = "1"
    probe = Path(f"{log}.probe")
    gpu_probe.install(probe)
    root = str(Path(__file__).resolve().parents[1])
    places = [str(probe), root, os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(place for place in places if place)
    sys.path[:0] = places[:2]
    try:
        import sglang

        start = time.perf_counter()
        engine = sglang.Engine(
            **{
                "model_path": model,
                "dtype": "bfloat16",
                "max_running_requests": 256,
                "max_total_tokens": room,
                # Of the whole device; the room is what limits an engine beside others.
                "mem_fraction_static": 0.95,
                # Engines wait for their turn without taking a core from the one that runs.
                "sleep_on_idle": True,
                "log_level": "info",
                "sampling_backend": "pytorch",
                **(extra or {}),
                **arguments,
            }
        )
        pipe.send(("ready", time.perf_counter() - start))
        while (request := pipe.recv()) is not None:
            method, given = request
            start = time.perf_counter()
            if method == "configure":
                answer = gpu_requests.configure(engine, file, **given)
            elif method in gpu_requests.TASKS:
                task = gpu_requests.TASKS[method]
                answer = engine.loop.run_until_complete(task(engine, **given))
            else:
                answer = getattr(engine, method)(**given)
            pipe.send((answer, time.perf_counter() - start))
        engine.shutdown()
    except BaseException:
        pipe.send(("failed", traceback.format_exc()))
        raise


class Variant:
    """Parent's end of one engine process."""

    def __init__(
        self, name: str, model: str, room: int, out: Path, extra: dict[str, Any] | None = None
    ) -> None:
        self.name, self.alive = name, True
        self.log = out / f"{name}.log"
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(
            target=serve, args=(name, model, room, str(self.log), theirs, extra)
        )
        self.process.start()
        theirs.close()

    def receive(self, timeout: float) -> tuple[Any, float] | None:
        """The next answer; None, and the end of this variant, on failure."""
        try:
            if not self.pipe.poll(timeout):
                raise TimeoutError(f"no answer in {timeout:.0f} s")
            answer, seconds = self.pipe.recv()
            if isinstance(answer, str) and answer == "failed":
                raise RuntimeError(str(seconds)[-1500:])
        except (EOFError, OSError, TimeoutError, RuntimeError) as fault:
            self.alive = False
            print(f"== {self.name} failed: {type(fault).__name__} {fault}", flush=True)
            print(_errors(self.log), flush=True)
            return None
        return answer, seconds

    def call(
        self, method: str, /, timeout: float = 100.0, **given: Any
    ) -> tuple[Any, float] | None:
        if not self.alive:
            return None
        self.pipe.send((method, given))
        return self.receive(timeout)

    def ask(self, method: str, /, timeout: float = 200.0, **given: Any) -> Any:
        """The answer alone.

        Raises:
            RuntimeError: there is none.
        """
        answer = self.call(method, timeout, **given)
        if answer is None:
            raise RuntimeError(f"{self.name} did not answer")
        return answer[0]

    def answers(
        self, prompts: list[list[int]], tokens: int, temperature: float = 0.0, **given: Any
    ) -> Any:
        """What :meth:`generate` answers, without its time."""
        params = {"max_new_tokens": tokens, "temperature": temperature, "ignore_eos": True}
        return self.ask("generate", input_ids=prompts, sampling_params=params, **given)

    def generate(
        self, prompts: list[list[int]], tokens: int, temperature: float = 0.0, **given: Any
    ) -> tuple[Any, float] | None:
        params = {"max_new_tokens": tokens, "temperature": temperature, "ignore_eos": True}
        return self.call("generate", input_ids=prompts, sampling_params=params, **given)

    def counters(self) -> dict[str, Any]:
        """ASPIRE's block of the server's state, without the list of requests."""
        answer = self.call("get_server_info")
        found = (answer[0]["internal_states"][0] if answer else {}).get("aspire", {})
        return {key: value for key, value in found.items() if key not in ("requests", "settings")}

    def full_rates(self, running: int, start: int) -> list[float]:
        """Tokens per second that the server itself logged while ``running`` requests ran.

        Args:
            start: bytes of the log to skip.
        """
        lines = self.log.read_bytes()[start:].decode(errors="replace").splitlines()
        found = [DECODE_LINE.search(line) for line in lines]
        # The first line of a run counts from the end of the run before.
        rates = [(int(m[1]), float(m[2])) for m in found if m][1:]
        return [rate for count, rate in rates if count == running]


def _errors(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    at = max((i for i, line in enumerate(lines) if "Traceback" in line), default=len(lines))
    return "\n".join(line[:300] for line in lines[max(0, at - 3) :][:45] or lines[-25:])


def load_prompts(model: str, count: int, length: int) -> list[list[int]]:
    """``count`` prompts of real text. Beyond the installed documents the same texts come again,
    each time a little shorter at the front, so that no two share a prefix."""
    from transformers import AutoTokenizer

    from aspire_sglang.cli.texts import real_texts

    tokenizer = AutoTokenizer.from_pretrained(model)
    distinct = min(count, 64)
    while True:
        try:
            texts = real_texts(tokenizer, [length] * distinct, seed=2)
            break
        except ValueError:
            distinct = distinct * 3 // 4
    print(f"{distinct} distinct texts", flush=True)
    ids = [list(text.input_ids) for text in texts]
    return [ids[i % distinct][29 * (i // distinct) :] for i in range(count)]


def check(variants: list[Variant], prompts: list[list[int]], tokens: int) -> dict[str, Any]:
    """Greedy texts of every variant against the first one's.

    A text may leave the reference where the reference itself was undecided: the difference of its
    two best log-probabilities there is reported.
    """
    reference, *others = variants
    asked = reference.generate(prompts, tokens, return_logprob=True, top_logprobs_num=2)
    if asked is None:
        return {}
    want = asked[0]
    found: dict[str, Any] = {}

    def compare(variant: Variant) -> None:
        before = variant.counters()
        answer = variant.generate(prompts, tokens)
        if answer is None:
            return
        after = variant.counters()
        splits = []
        for ours, theirs in zip(answer[0], want, strict=True):
            a, b = ours["output_ids"], theirs["output_ids"]
            at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
            if at is not None:
                top = theirs["meta_info"]["output_top_logprobs"][at]
                gap, second = top[0][0] - top[1][0], top[1][1]
                splits.append({"at": at, "gap": gap, "second": a[at] == second})
            elif len(a) != len(b):
                splits.append({"at": -1, "lengths": [len(a), len(b)]})
        worst = max((s.get("gap", 99.0) for s in splits), default=0.0)
        found[variant.name] = {
            "texts": len(want),
            "same": len(want) - len(splits),
            "worst_gap": worst,
            "all_second_best": all(s.get("second", False) for s in splits),
            "splits": splits,
            "counters": _difference(before, after),
        }

    with ThreadPoolExecutor(max(len(others), 1)) as pool:
        list(pool.map(compare, [variant for variant in others if variant.alive]))
    return found


def _difference(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    changed = {}
    for key, value in after.items():
        if isinstance(value, (int, float)) and key != "mixed_step_fraction":
            changed[key] = value - before.get(key, 0)
        elif key == "draft_lengths":
            old = before.get(key, {})
            changed[key] = {k: n - old.get(k, 0) for k, n in value.items() if n - old.get(k, 0)}
        elif key == "cost_model":
            changed[key] = value
    return changed


def measure(
    variants: list[Variant],
    prompts: list[list[int]],
    lengths: tuple[int, int],
    repeats: int,
    temperature: float,
) -> dict[str, Any]:
    """Output tokens per second of each variant, one after the other in each repeat.

    ``tokens_per_s`` includes the end of a run, when the requests with the fewest accepted drafts
    run alone; ``steady_tokens_per_s`` is the median of what the server logged while all ran.
    """
    short, long = lengths
    found: dict[str, Any] = {v.name: {"repeats": [], "prefill_s": None} for v in variants}
    for variant in variants:
        prefill = variant.generate(prompts, 1)
        warm = variant.generate(prompts, short, temperature)
        if prefill and warm:
            found[variant.name]["prefill_s"] = prefill[1]
    for _ in range(repeats):
        for variant in variants:
            first = variant.generate(prompts, short, temperature)
            before = variant.counters()
            start = variant.log.stat().st_size
            second = variant.generate(prompts, long, temperature)
            after = variant.counters()
            if first is None or second is None:
                continue
            seconds = second[1] - first[1]
            rate = len(prompts) * (long - short) / seconds
            full = variant.full_rates(len(prompts), start)
            steady = statistics.median(full) if full else None
            found[variant.name]["repeats"].append(
                {
                    "seconds": [first[1], second[1]],
                    "tokens_per_s": rate,
                    "steady_tokens_per_s": steady,
                    "steady_log": full,
                }
            )
            found[variant.name]["counters"] = _difference(before, after)
            print(
                f"   {len(prompts)} x {variant.name}: {rate:,.0f} tokens/s, steady {steady}",
                flush=True,
            )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--variants", nargs="+", default=["stock", "aspire"], choices=VARIANTS)
    parser.add_argument("--timed", nargs="+", default=["stock", "aspire"], choices=VARIANTS)
    parser.add_argument("--requests", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--prompt-tokens", type=int, default=7000)
    parser.add_argument("--new-tokens", type=int, nargs=2, default=(32, 288))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0])
    parser.add_argument("--check", type=int, default=16, help="texts compared before timing")
    parser.add_argument("--start-timeout", type=float, default=170.0)
    parser.add_argument("--commit", default=None)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    room = max(options.requests, default=16) * (options.prompt_tokens + options.new_tokens[1] + 80)
    variants = [Variant(name, options.model, room, options.out) for name in options.variants]
    prompts = load_prompts(options.model, max(*options.requests, 64), options.prompt_tokens)
    result: dict[str, Any] = {"options": {k: str(v) for k, v in vars(options).items()}}
    result["environment"] = _environment(options.commit)
    for variant in variants:
        left = options.start_timeout - (time.perf_counter() - start)
        ready = variant.receive(max(left, 1.0))
        print(f"{variant.name}: {ready} at {time.perf_counter() - start:.0f} s", flush=True)
    file = options.out / "gpu_engine.json"
    if options.check:
        lengths = [500 + 400 * i for i in range(options.check)]
        some = [prompts[i][: min(n, 6500)] for i, n in enumerate(lengths)]
        result["check"] = check(variants, some, 96)
        file.write_text(json.dumps(result, indent=1))
        for name, found in result["check"].items():
            print(name, json.dumps(found)[:900], flush=True)
    timed = [variant for variant in variants if variant.name in options.timed and variant.alive]
    for temperature in options.temperatures:
        for count in options.requests:
            key = f"{count} x {options.prompt_tokens}, temperature {temperature}"
            print(f"-- {key} at {time.perf_counter() - start:.0f} s", flush=True)
            result[key] = measure(
                timed, prompts[:count], tuple(options.new_tokens), options.repeats, temperature
            )
            file.write_text(json.dumps(result, indent=1))
            for name, found in result[key].items():
                print("  ", name, json.dumps(found.get("counters"))[:900], flush=True)
    for variant in variants:
        variant.process.kill()
    print(f"done at {time.perf_counter() - start:.0f} s", flush=True)
    return 0


def _environment(commit: str | None) -> dict[str, Any]:
    import torch

    from aspire_sglang.cli.machine import describe_machine, describe_versions

    return {
        "commit": commit,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        **describe_machine(),
        "versions": describe_versions(),
    }


if __name__ == "__main__":
    # Engines start processes of their own, which outlive a killed parent unless told otherwise.
    code = main()
    sys.stdout.flush()
    os._exit(code)
