"""When to stop drafting, replayed on recorded runs: what a predictor's stops are worth.

    python bench/stops.py TOKENS.npz...               # written by bench/context_loops.py --keep

Every recorded run is a round of a batch of requests like it, cut where the rule stops; tokens come
from the record and times from the cost model, so every figure is replayed. Rules learn from what
their own stops reveal. The best fixed length and the oracle are chosen in hindsight.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


from aspire_sglang.speculation.acceptance import BetaAcceptance
from aspire_sglang.speculation.confidence import ConfidenceCalibration, RunJudge
from aspire_sglang.speculation.cost_model import CostModel, StepShape
from aspire_sglang.speculation.policies import AspirePolicy, RowState
from aspire_sglang.speculation.predictor import AcceptancePredictor
from bench.predictors import Run, read_runs
from bench.simulator import TWO_CORES

Stop = Callable[[Run, float], int]


@dataclass(frozen=True)
class Batch:
    """Equal requests: how many, tokens of context, tokens a draft reads, longest draft."""

    rows: int
    context: int
    draft_kv: int
    longest: int
    cost: CostModel

    def seconds(self, drafts: int) -> float:
        """Time of a round of so many drafts and a verify."""
        kv, queries, context = self.rows * self.draft_kv, drafts + 1, self.context + drafts + 1
        draft = StepShape(self.rows, kv, kv)
        verify = StepShape(self.rows * queries, self.rows * context, self.rows * queries * context)
        return drafts * self.cost.predict(draft) + self.cost.predict(verify)


class Rule:
    """The paper's rule, with the survival of the pending run told by a judge, if there is one."""

    def __init__(self, batch: Batch, judge: RunJudge | None) -> None:
        self._batch, self._judge = batch, judge
        self._policy = AspirePolicy(gamma_max=batch.longest)

    def stop(self, run: Run, rate: float) -> int:
        """Drafts before the verify; learns from what it reveals."""
        tokens: list[Any] = []
        batch = self._batch
        for pending in range(batch.longest + 1):
            survival = None
            if self._judge is not None and tokens:
                survival = self._judge.survival(tokens, rate)
            row = RowState(
                batch.context, pending, batch.draft_kv, rate, batch.longest, 5, survival=survival
            )
            if self._policy.decide([row] * batch.rows, batch.cost)[0]:
                break
            if self._judge is not None:
                known = float(run["token_prob"][pending]), float(run["gap"][pending])
                tokens.append(self._judge.token(*known, pending, rate))
        if self._judge is not None:
            self._judge.observe(tokens, min(run["accepted"], pending))
        return pending


def play(runs: Sequence[Run], batch: Batch, stop: Stop) -> dict[str, float]:
    """Tokens per second of a request, and mean drafts; the first eighth is not counted."""
    rates: dict[int, BetaAcceptance] = {}
    tokens = drafts = rounds = 0
    seconds = 0.0
    for number, run in enumerate(runs):
        estimate = rates.setdefault(run["row"], BetaAcceptance())
        length = stop(run, estimate.rate)
        accepted = min(run["accepted"], length)
        if length:
            estimate.observe(length, accepted)
        if number >= len(runs) // 8:
            tokens += accepted + 1
            drafts += length
            rounds += 1
            seconds += batch.seconds(length)
    return {"tokens_per_s": tokens / seconds, "drafts": drafts / rounds}


def compare(runs: Sequence[Run], batch: Batch) -> dict[str, dict[str, float]]:
    """Every rule on the same runs."""

    def oracle(run: Run, rate: float) -> int:
        length = min(run["accepted"], batch.longest)
        pays = (length + 1) / batch.seconds(length) > 1 / batch.seconds(0)
        return length if pays else 0

    def fixed(length: int) -> Stop:
        return lambda run, rate: length

    found = [play(runs, batch, fixed(length)) for length in range(batch.longest + 1)]
    return {
        "best fixed length": max(found, key=lambda result: result["tokens_per_s"]),
        "rate of the request": play(runs, batch, Rule(batch, None).stop),
        "token probability in bins": play(runs, batch, Rule(batch, ConfidenceCalibration()).stop),
        "regression": play(runs, batch, Rule(batch, AcceptancePredictor()).stop),
        "oracle": play(runs, batch, oracle),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Replay recorded runs under one cost model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tokens", type=Path, nargs="+")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--context", type=int, default=6000)
    parser.add_argument("--draft-kv", type=int, default=700)
    parser.add_argument("--fixed", type=float, default=TWO_CORES.fixed, help="seconds per step")
    parser.add_argument("--per-token", type=float, default=TWO_CORES.per_token)
    parser.add_argument("--per-kv", type=float, default=TWO_CORES.per_kv)
    parser.add_argument("--per-pair", type=float, default=TWO_CORES.per_pair)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(argv)
    cost = CostModel(options.fixed, options.per_token, options.per_kv, options.per_pair)
    results = {}
    for path in options.tokens:
        runs = read_runs(path)
        longest = len(runs[0]["token_prob"])
        batch = Batch(options.rows, options.context, options.draft_kv, longest, cost)
        results[path.stem] = found = compare(runs, batch)
        base = found["best fixed length"]["tokens_per_s"]
        for name, result in found.items():
            print(
                f"{path.stem:16}{name:28}{result['tokens_per_s'] / base:7.3f} x the best fixed "
                f"length, {result['drafts']:.1f} drafts"
            )
    if options.out:
        options.out.write_text(json.dumps(results, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
