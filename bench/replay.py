"""Schedules on replayed acceptance: what a clairvoyant one would still win, and what each part is
worth without a server's noise.

    python bench/replay.py TOKENS.npz                 # written by bench/context_loops.py --keep
    python bench/replay.py TOKENS.npz --fixed 2e-3 --per-kv 1e-8 --per-token 1e-5
    python bench/replay.py bench/results/h200-accepts.json --temperature 0.7 --waves 2 --seeds 2 \\
        --fixed 1.45e-3 --per-token 0.93e-6 --per-kv 6.7e-9 --per-pair 0

The last one replays requests of an ablation on an H200 (``bench/gpu_ablation.py``): 256 at a time,
with their contexts, on the step costs of that device.

The outcomes of drafts are those of real texts; steps are not run, their times are the cost model's.
So every figure is replayed, not measured. The oracle knows how many of the coming drafts will be
accepted and drafts exactly those, or none where a verify alone is faster.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from aspire_sglang.speculation.cost_model import CostModel, StepShape
from aspire_sglang.speculation.policies import Policy, RowState, make_policy
from aspire_sglang.speculation.rows import StepwisePolicy
from bench.simulator import LAYERS, TWO_CORES, Workload, simulate

FIXED = (1, 2, 3, 4, 6, 8, 10, 12, 16)
COST_RATIOS = (0.05, 0.1, 0.2, 0.4, 0.6)


@dataclass(frozen=True, slots=True)
class OraclePolicy(StepwisePolicy):
    """Knows, as ``length`` of a row, how many of its coming drafts will be accepted.

    It maximizes each request's throughput as the paper's rule does: n drafts that will all be
    accepted commit n + 1 tokens, and a draft behind them is wasted, so it is all of them or none.
    """

    name: ClassVar[str] = "oracle"

    def decide(self, rows: Sequence[RowState], cost: CostModel) -> list[bool]:
        """True for rows whose run is over, and for those that had better decode plainly."""
        return [self._verify(row, len(rows), cost) for row in rows]

    def _verify(self, row: RowState, batch: int, cost: CostModel) -> bool:
        run = min(row.length, row.max_draft)
        if row.pending >= run or row.pending:
            return row.pending >= run
        kv = batch * row.draft_kv
        draft = cost.predict(StepShape(batch, kv, kv))

        def verify(drafts: int) -> float:
            queries, context = drafts + 1, row.committed + drafts + 1
            shape = StepShape(batch * queries, batch * context, batch * queries * context)
            return cost.predict(shape)

        return (run + 1) / (verify(run) + run * draft) <= 1 / verify(0)


def traces_of(accepted: np.ndarray, gamma: int) -> list[list[bool]]:
    """Outcomes of the drafts of every row, run after run.

    Args:
        accepted: ``[rounds, rows]`` accepted drafts of runs of ``gamma``.
    """
    traces = []
    for row in accepted.T:
        trace: list[bool] = []
        for run in row.tolist():
            trace += [True] * run + [False] * (run < gamma)
        traces.append(trace)
    return traces


def read_record(path: Path, temperature: float) -> tuple[list[list[bool]], tuple[int, ...]]:
    """Outcomes and prompt lengths of the requests of a server's rounds with one draft length.

    Raises:
        KeyError: there is no round of this temperature.
    """
    record = json.loads(path.read_text())
    traces = []
    for accepted in record[f"temperature {temperature}"]:
        traces += traces_of(np.array(accepted)[:, None], record["gamma"])
    return traces, tuple(record["prompt_tokens"])


def compare(
    traces: Sequence[Sequence[bool]], work: Workload, cost: CostModel, steps: int, seeds: int
) -> dict[str, dict[str, Any]]:
    """Mean replayed tokens per second of every schedule; swept ones at their best setting."""

    def mean(policy: Policy, oracle: bool = False) -> float:
        runs = [
            simulate(policy, work, cost, steps, seed=seed, oracle=oracle, traces=traces)
            for seed in range(seeds)
        ]
        return float(np.mean([run.full_rate if work.waves > 1 else run.rate for run in runs]))

    def best(name: str, option: str, values: Sequence[float]) -> dict[str, Any]:
        rates = {value: mean(make_policy(name, **{option: value})) for value in values}
        value = max(rates, key=rates.__getitem__)
        return {"tokens_per_s": rates[value], option: value}

    found: dict[str, dict[str, Any]] = {
        "A0 plain": {"tokens_per_s": mean(make_policy("ar"))},
        "A3 in step, best length": best("fixed", "gamma", FIXED),
        "A5 staggered, best length": best("staggered", "gamma", FIXED),
        "A6 feedback": {"tokens_per_s": mean(make_policy("feedback"))},
        "A7 constant cost, best ratio": best("constant_cost", "cost_ratio", COST_RATIOS),
        "A8 the paper's rule": {"tokens_per_s": mean(make_policy("aspire"))},
        "A9 one length for all": {"tokens_per_s": mean(make_policy("global"))},
        "shadow price": {"tokens_per_s": mean(make_policy("shadow_price"))},
        "A8, mean acceptance known": {
            "tokens_per_s": mean(make_policy("aspire", first_draft=16), oracle=True)
        },
        "A10 oracle": {"tokens_per_s": mean(OraclePolicy(), oracle=True)},
    }
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Replay recorded acceptance under one cost model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tokens", type=Path)
    parser.add_argument("--gamma", type=int, default=16, help="drafts per recorded verify")
    parser.add_argument("--temperature", type=float, default=0.7, help="of a record in JSON")
    parser.add_argument("--waves", type=int, default=1, help="requests per place; of a record")
    parser.add_argument("--new-tokens", type=int, default=256, help="per request; of a record")
    parser.add_argument("--requests", type=int, default=Workload.requests)
    parser.add_argument("--contexts", type=int, nargs=2, default=Workload.contexts)
    parser.add_argument("--fixed", type=float, default=TWO_CORES.fixed, help="seconds per step")
    parser.add_argument("--per-token", type=float, default=TWO_CORES.per_token)
    parser.add_argument("--per-kv", type=float, default=TWO_CORES.per_kv)
    parser.add_argument("--per-pair", type=float, default=TWO_CORES.per_pair)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(argv)
    cost = CostModel(options.fixed, options.per_token, options.per_kv, options.per_pair)
    if options.tokens.suffix == ".json":
        traces, prompts = read_record(options.tokens, options.temperature)
        options.requests, options.contexts = len(prompts), (min(prompts), max(prompts))
        options.steps = 10**6
        work = Workload(
            options.requests,
            options.contexts,
            ratio=0.07,
            refreshing=1 / LAYERS,
            prompts=prompts,
            new_tokens=options.new_tokens,
            waves=options.waves,
        )
    else:
        with np.load(options.tokens) as recorded:
            traces = traces_of(recorded["accepted"], options.gamma)
        work = Workload(options.requests, tuple(options.contexts))
    found = compare(traces, work, cost, options.steps, options.seeds)
    plain = found["A0 plain"]["tokens_per_s"]
    oracle = found["A10 oracle"]["tokens_per_s"]
    print("replayed tokens/s")
    for name, result in found.items():
        rate = result["tokens_per_s"]
        swept = ", ".join(f"{k} {v}" for k, v in result.items() if k != "tokens_per_s")
        print(f"{name:30}{rate:10.1f}{rate / plain:8.2f} x plain{rate / oracle:8.1%}  {swept}")
    if options.out:
        about = {
            "label": "replayed: recorded acceptance, modelled step times",
            "file": options.tokens.name,
            "temperature": options.temperature if options.tokens.suffix == ".json" else None,
            "waves": work.waves,
            "requests": options.requests,
            "contexts": list(options.contexts),
            "cost": {
                name: getattr(options, name)
                for name in ("fixed", "per_token", "per_kv", "per_pair")
            },
        }
        options.out.write_text(json.dumps({**about, "results": found}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
