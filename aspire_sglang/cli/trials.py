"""Which draft contexts a calibration tries, and which one it keeps.

One setting after another, each with the best of those before it: refresh layer (coarse, then the
neighbours of the best), head reduction, page size, budget. The first ones are judged by accept
length, the budget by the throughput that accept length and step costs promise. Last, ways to choose
the pages: what their lists cost is no part of a promise, so those are timed with the default
schedule.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from aspire_sglang.speculation.cost_model import CostModel, StepShape

#: Layers tried at first.
_COARSE = 7
_BUDGETS = (128, 256, 512, 1024, 2048)
_PAGE_SIZES = (16, 8, 32)


@dataclass(frozen=True)
class Candidate:
    """A draft context.

    Attributes:
        refresh_layer: layer whose attention chooses the pages.
        reduction: how query heads vote.
        page_size: tokens per page.
        tokens: budget of a draft row in tokens, whatever the context.
        selection: which pages a draft row reads.
    """

    refresh_layer: int
    reduction: str = "max"
    page_size: int = 16
    tokens: int = 512
    selection: str = "refresh"

    def settings(self) -> dict[str, Any]:
        """The configuration's section ``context``."""
        return {
            "selection": self.selection,
            "refresh_layer": self.refresh_layer,
            "reduction": self.reduction,
            "page_size": self.page_size,
            "min_pages": max(self.tokens // self.page_size, 1),
            # The budget is a number of tokens here, whatever the context.
            "ratio": 0.0,
            "last_pages": max(min(128, self.tokens // 4) // self.page_size, 1),
        }


@dataclass(frozen=True)
class Trial:
    """What one candidate reached.

    Attributes:
        stage: the setting that was varied.
        candidate: the draft context.
        accept_length: mean tokens per verify of ``gamma`` drafts.
        rate: accepted drafts per draft judged.
        verifies: verifies it is the mean of.
        tokens_per_s: what all texts together were continued with, if that was timed; then the
            other figures are those of the default schedule.
    """

    stage: str
    candidate: Candidate
    accept_length: float
    rate: float
    verifies: int
    tokens_per_s: float | None = None


class Journal:
    """Finished trials in a file, so that an interrupted calibration goes on where it stopped."""

    def __init__(self, path: Path, key: dict[str, Any]) -> None:
        """``key``: what the trials depend on; those of another key are not used.

        Raises:
            ValueError: the file belongs to another calibration.
        """
        self._path = path
        self._done: dict[tuple[Candidate, bool], Trial] = {}
        if path.exists():
            lines = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
            if lines and lines[0] != key:
                raise ValueError(
                    f"{path} holds trials of another calibration (model, texts or flags differ); "
                    "remove it or choose another --work directory"
                )
            for line in lines[1:]:
                candidate = Candidate(**line.pop("candidate"))
                self._note(Trial(candidate=candidate, **line))
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(key) + "\n")

    def get(self, candidate: Candidate, timed: bool = False) -> Trial | None:
        """The finished trial of a candidate, if there is one; ``timed``: one that was timed."""
        return self._done.get((candidate, timed))

    def _note(self, trial: Trial) -> None:
        self._done[trial.candidate, trial.tokens_per_s is not None] = trial

    def add(self, trial: Trial) -> None:
        """Note a finished trial at once."""
        self._note(trial)
        with self._path.open("a") as file:
            file.write(json.dumps(asdict(trial)) + "\n")


def stages(
    num_layers: int, context: int
) -> Iterator[tuple[str, Callable[[Candidate], list[Candidate]]]]:
    """Stages in order: their name, and the candidates they try given the best one so far."""

    def coarse(best: Candidate) -> list[Candidate]:
        count = min(_COARSE, num_layers)
        layers = {round((i + 1) * num_layers / (count + 1)) for i in range(count)}
        return [_with(best, refresh_layer=min(layer, num_layers - 1)) for layer in sorted(layers)]

    def fine(best: Candidate) -> list[Candidate]:
        step = max(num_layers // (_COARSE + 1) // 2, 1)
        near = (best.refresh_layer - step, best.refresh_layer, best.refresh_layer + step)
        return [_with(best, refresh_layer=layer) for layer in near if 0 <= layer < num_layers]

    yield "refresh layer", coarse
    yield "refresh layer, nearby", fine
    yield "reduction", lambda best: [_with(best, reduction=name) for name in ("max", "mean")]
    yield "page size", lambda best: [_with(best, page_size=size) for size in _PAGE_SIZES]
    yield "budget", lambda best: [_with(best, tokens=n) for n in _BUDGETS if n < context]


def selections(best: Candidate, shared_only: bool) -> list[Candidate]:
    """Ways to choose the pages, with the rest of the best candidate, which comes first.

    Args:
        shared_only: layers must share one list, as with tensor parallelism.
    """
    names = ("refresh", "window", "last_verify")
    own = () if shared_only else ("last_verify_per_layer", "hybrid")
    return [_with(best, selection=name) for name in (*names, *own)]


def promised_throughput(
    cost: CostModel, rate: float, tokens: int, context: int, batch: int, gamma_max: int
) -> float:
    """Tokens per second of ``batch`` equal requests at their best draft length.

    The objective of the paper's rule, see :class:`aspire_sglang.speculation.policies.AspirePolicy`.
    """
    best = 0.0
    for gamma in range(gamma_max + 1):
        expected = sum(rate**n for n in range(gamma + 1))
        queries = gamma + 1
        verify = StepShape(
            batch * queries, batch * (context + queries), batch * queries * (context + queries)
        )
        draft = StepShape(batch, batch * tokens, batch * tokens)
        seconds = cost.predict(verify) + gamma * cost.predict(draft)
        best = max(best, batch * expected / seconds)
    return best


def _with(candidate: Candidate, **changes: Any) -> Candidate:
    return Candidate(**{**asdict(candidate), **changes})
