"""Predictors of acceptance on recorded draft tokens they have not seen: AUC and calibration.

    python bench/predictors.py TOKENS.npz...      # written by bench/context_loops.py --keep

Every run is predicted before it is learned from, in the order in which a server would see it, so
all figures are of unseen tokens. ``texts`` also holds back half of the texts: what was learned on
the others is judged on them, without learning from them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from aspire_sglang.speculation.acceptance import BetaAcceptance
from aspire_sglang.speculation.confidence import ConfidenceCalibration
from aspire_sglang.speculation.predictor import AcceptancePredictor, features

Run = dict[str, Any]


def auc(scores: Sequence[float], outcomes: Sequence[bool]) -> float:
    """Probability that an accepted token scores above a rejected one; ties count half."""
    from scipy.stats import rankdata

    ranks = rankdata(scores)
    good = np.asarray(outcomes, dtype=bool)
    accepted, rejected = int(good.sum()), int((~good).sum())
    if not accepted or not rejected:
        raise ValueError("both accepted and rejected tokens are needed")
    return float((ranks[good].sum() - accepted * (accepted + 1) / 2) / (accepted * rejected))


def calibration_error(scores: Sequence[float], outcomes: Sequence[bool], bins: int = 10) -> float:
    """Mean distance between prediction and outcome over bins of equally many tokens."""
    order = np.argsort(scores, kind="stable")
    parts = zip(
        np.array_split(np.asarray(scores)[order], bins),
        np.array_split(np.asarray(outcomes, dtype=float)[order], bins),
        strict=True,
    )
    distances = [(abs(s.mean() - o.mean()), len(s)) for s, o in parts if len(s)]
    return float(sum(d * n for d, n in distances) / len(order))


def runs_of(recorded: dict[str, np.ndarray]) -> list[Run]:
    """Verifies in the order of a server that runs all rows at once."""
    rounds, rows = recorded["accepted"].shape
    return [
        {
            "row": row,
            "accepted": int(recorded["accepted"][number, row]),
            **{name: recorded[name][number, row] for name in ("token_prob", "gap")},
        }
        for number in range(rounds)
        for row in range(rows)
    ]


def read_runs(path: Path) -> list[Run]:
    """The verifies recorded in an ``.npz`` file."""
    with np.load(path) as recorded:
        return runs_of({name: recorded[name] for name in recorded})


class _ByRate:
    """The request's recent rate alone."""

    def predict(self, run: Run, rate: float) -> list[float]:
        return [rate] * len(run["token_prob"])

    def learn(self, run: Run, rate: float) -> None:
        pass


class _ByConfidence(_ByRate):
    """The calibrated probability of the token, as the server does."""

    def __init__(self) -> None:
        self._bins = ConfidenceCalibration()

    def predict(self, run: Run, rate: float) -> list[float]:
        return [self._bins.rate(float(p), rate) for p in run["token_prob"]]

    def learn(self, run: Run, rate: float) -> None:
        self._bins.observe([float(p) for p in run["token_prob"]], run["accepted"])


class _ByRegression(_ByRate):
    """Online logistic regression on everything that is known."""

    def __init__(self) -> None:
        self.model = AcceptancePredictor()

    def _tokens(self, run: Run, rate: float) -> list[np.ndarray]:
        return [
            features(float(p), float(gap), place, rate)
            for place, (p, gap) in enumerate(zip(run["token_prob"], run["gap"], strict=True))
        ]

    def predict(self, run: Run, rate: float) -> list[float]:
        return [self.model.rate(token) for token in self._tokens(run, rate)]

    def learn(self, run: Run, rate: float) -> None:
        self.model.observe(self._tokens(run, rate), run["accepted"])


PREDICTORS: dict[str, Callable[[], _ByRate]] = {
    "recent rate": _ByRate,
    "token probability in bins": _ByConfidence,
    "regression": _ByRegression,
}


def judge(runs: Sequence[Run], make: Callable[[], _ByRate], skip: int, held: set[int]) -> dict:
    """Scores of one predictor.

    Args:
        skip: first runs that are learned from but not judged.
        held: rows to judge; if given, nothing is learned from them and only they are judged, after
            everything else has been learned.
    """
    predictor = make()
    rates: dict[int, BetaAcceptance] = {}
    scores: list[float] = []
    outcomes: list[bool] = []

    def look(run: Run, judged: bool, learned: bool) -> None:
        estimate = rates.setdefault(run["row"], BetaAcceptance())
        rate, known = estimate.rate, run["accepted"] + 1
        if judged:
            told = predictor.predict(run, rate)[:known]
            scores.extend(told)
            outcomes.extend(place < run["accepted"] for place in range(len(told)))
        if learned:
            predictor.learn(run, rate)
        estimate.observe(len(run["token_prob"]), run["accepted"])

    if held:
        for run in runs:
            if run["row"] not in held:
                look(run, judged=False, learned=True)
        for run in runs:
            if run["row"] in held:
                look(run, judged=True, learned=False)
    else:
        for number, run in enumerate(runs):
            look(run, judged=number >= skip, learned=True)
    brier = float(np.mean((np.asarray(scores) - np.asarray(outcomes, dtype=float)) ** 2))
    return {
        "auc": auc(scores, outcomes),
        "calibration_error": calibration_error(scores, outcomes),
        "brier": brier,
        "tokens": len(scores),
        "rejected": int(len(outcomes) - sum(outcomes)),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Judge all predictors on recorded tokens."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tokens", type=Path, nargs="+")
    parser.add_argument("--rows-per-text", type=int, default=1)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(argv)
    found: dict[str, Any] = {}
    for path in options.tokens:
        runs = read_runs(path)
        rows = 1 + max(run["row"] for run in runs)
        held = {row for row in range(rows) if row // options.rows_per_text % 2}
        found[path.stem] = {
            name: {
                "online": judge(runs, make, skip=len(runs) // 8, held=set()),
                "other texts": judge(runs, make, skip=0, held=held),
            }
            for name, make in PREDICTORS.items()
        }
        for name, figures in found[path.stem].items():
            for way, values in figures.items():
                print(
                    f"{path.stem:12} {name:28} {way:12} AUC {values['auc']:.3f}  calibration "
                    f"{values['calibration_error']:.3f}  Brier {values['brier']:.4f}  "
                    f"({values['tokens']} tokens, {values['rejected']} rejected)"
                )
    if options.out:
        options.out.write_text(json.dumps(found, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
