"""``aspire calibrate``: fit the sparse context to a model, on the machine that will serve it.

One ASPIRE server runs all trials: the configuration is changed between rounds over the same
prompts, which stay in the prefix cache. Greedy, at one draft length, so every candidate sees the
same text and only its drafts differ. Ways to choose the pages are timed last, with the default
schedule.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from aspire_sglang.cli.client import (
    aspire_block,
    continue_all,
    draft_rate,
    full_run_lengths,
    reload_config,
)
from aspire_sglang.cli.server import Server
from aspire_sglang.cli.trials import (
    Candidate,
    Journal,
    Trial,
    promised_throughput,
    selections,
    stages,
)
from aspire_sglang.speculation.cost_model import CostModel

#: A candidate replaces the best one only if it is better by this share: less is noise.
_MARGIN = 0.01

_RANK_FLAGS = ("--tp", "--tp-size", "--tensor-parallel-size")

#: Timed rounds differ by a few percent.
_TIMED_MARGIN = 0.03
_TIMED_ROUNDS = 2


@dataclass(frozen=True)
class Plan:
    """What is calibrated, and on what.

    Attributes:
        model: path or name of the model.
        server_args: further flags of the server.
        prompts: token ids of the texts.
        num_layers: of the model.
        gamma: drafts per verify during the trials.
        new_tokens: tokens generated per text and trial.
        batch: running requests that the budget is chosen for.
    """

    model: str
    server_args: tuple[str, ...]
    prompts: tuple[tuple[int, ...], ...]
    num_layers: int
    gamma: int
    new_tokens: int
    batch: int

    @property
    def context(self) -> int:
        """Mean tokens of a prompt."""
        return round(statistics.fmean(len(prompt) for prompt in self.prompts))

    @property
    def shared_only(self) -> bool:
        """Whether the flags ask for several ranks, which need one list for all layers."""
        return any(arg.split("=")[0] in _RANK_FLAGS for arg in self.server_args)

    def key(self) -> dict[str, Any]:
        """What the trials depend on."""
        texts = hashlib.sha256(json.dumps(self.prompts).encode()).hexdigest()[:16]
        return {
            "model": self.model,
            "server_args": list(self.server_args),
            "texts": texts,
            "gamma": self.gamma,
            "new_tokens": self.new_tokens,
        }


@dataclass(frozen=True)
class Calibration:
    """Outcome of a calibration.

    Attributes:
        best: the trial whose refresh layer, head reduction, page size and budget are kept.
        trials: all in order, those that were timed last.
        cost: the server's cost model.
        fastest: the timed trial whose draft context is kept.
    """

    best: Trial
    trials: list[Trial]
    cost: CostModel
    fastest: Trial


def calibrate(plan: Plan, work: Path, console: Console) -> Calibration:
    """Run all trials that the work directory does not hold yet.

    Raises:
        ValueError: the work directory belongs to another calibration.
        ServerError: the server did not start; the message ends with the end of its log.
    """
    journal = Journal(work / "trials.jsonl", plan.key())
    config = work / "trial.yaml"
    first = Candidate(refresh_layer=(plan.num_layers - 1) // 2)
    room = sum(map(len, plan.prompts)) + len(plan.prompts) * (plan.new_tokens + 4 * plan.gamma)
    args = [
        *("--model-path", plan.model, "--attention-backend", "aspire"),
        *("--speculative-algorithm", "ASPIRE", "--aspire-config", str(config)),
        *("--speculative-num-steps", str(plan.gamma)),
        *("--max-running-requests", str(len(plan.prompts))),
        *("--max-total-tokens", str(room + 1024), "--log-level-http", "warning"),
        *plan.server_args,
    ]
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with (
        ExitStack() as stack,
        Progress(*columns, console=console) as progress,
    ):
        host = _Host(args, config, plan, work / "server.log", stack, console)
        task = progress.add_task("reading the texts")
        host.start(first)
        # One model for all comparisons, those with trials of an earlier run included.
        cost = host.cost()
        trials: list[Trial] = []
        best: Trial | None = None
        for stage, candidates in stages(plan.num_layers, plan.context):
            # Each stage holds the best one so far again; it was measured.
            tried = {trial.candidate for trial in trials}
            fresh = [c for c in candidates(best.candidate if best else first) if c not in tried]
            for number, candidate in enumerate(fresh, start=1):
                place = f"{stage}, {number} of {len(fresh)}"
                progress.update(task, description=f"{place}: {_short(candidate)}")
                trial = journal.get(candidate)
                if trial is None:
                    trial = host.measure(stage, candidate)
                    journal.add(trial)
                trials.append(trial)
                if best is None or (
                    _value(plan, cost, trial, stage)
                    > _value(plan, cost, best, stage) * (1 + _MARGIN)
                ):
                    best = trial
        assert best is not None
        timed: list[Trial] = []
        for candidate in selections(best.candidate, plan.shared_only):
            progress.update(task, description=f"timing: {candidate.selection}")
            trial = journal.get(candidate, timed=True)
            if trial is None:
                trial = host.time(candidate)
                journal.add(trial)
            timed.append(trial)
    return Calibration(best, trials + timed, cost, fastest_of(timed))


def fastest_of(timed: Sequence[Trial]) -> Trial:
    """The first one, unless another is faster beyond noise."""
    fastest, least = timed[0], (timed[0].tokens_per_s or 0.0) * (1 + _TIMED_MARGIN)
    for trial in timed[1:]:
        if (trial.tokens_per_s or 0.0) > max(least, fastest.tokens_per_s or 0.0):
            fastest = trial
    return fastest


def _value(plan: Plan, cost: CostModel, trial: Trial, stage: str) -> float:
    # More budget always predicts better; whether it pays is a question of time.
    return promise(plan, cost, trial) if stage == "budget" else trial.accept_length


def promise(plan: Plan, cost: CostModel, trial: Trial) -> float:
    """Tokens per second that a trial's rate and budget promise."""
    tokens = trial.candidate.tokens
    return promised_throughput(cost, trial.rate, tokens, plan.context, plan.batch, plan.gamma)


class _Host:
    """The server that runs the trials."""

    def __init__(
        self,
        args: list[str],
        config: Path,
        plan: Plan,
        log: Path,
        stack: ExitStack,
        console: Console,
    ) -> None:
        self._server = Server(args, log=log, console=console)
        self._config = config
        self._plan = plan
        stack.callback(self._server.stop)

    def start(self, candidate: Candidate, timed: bool = False) -> None:
        """Start the server with a candidate, and read the texts into its cache."""
        _write(self._config, candidate, self._plan.gamma, timed)
        self._server.start()
        self._server.wait_ready()
        continue_all(self._server.url, self._plan.prompts, 1, "warm")

    def cost(self) -> CostModel:
        """Step costs as the server knows them now."""
        found = aspire_block(self._server.url)["cost_model"]
        names = ("fixed_us", "per_token_us", "per_kv_us", "per_pair_us")
        return CostModel(*(found[name] * 1e-6 for name in names))

    def measure(self, stage: str, candidate: Candidate) -> Trial:
        """Continue all texts with a candidate."""
        plan, url = self._plan, self._server.url
        self._switch(candidate)
        label = hashlib.sha256(repr(candidate).encode()).hexdigest()[:12]
        rids = continue_all(url, plan.prompts, plan.new_tokens, f"calibrate-{label}")
        kept = aspire_block(url)["requests"]
        lengths = full_run_lengths([kept[rid] for rid in rids], plan.gamma)
        if not lengths:
            raise RuntimeError(f"no verify of {plan.gamma} drafts in a trial; raise --new-tokens")
        rate = draft_rate(lengths, plan.gamma)
        return Trial(stage, candidate, statistics.fmean(lengths), rate, len(lengths))

    def time(self, candidate: Candidate) -> Trial:
        """Continue all texts with a candidate and the default schedule; of several rounds the
        fastest, as other work on the machine can only slow one down."""
        plan, url = self._plan, self._server.url
        self._switch(candidate, timed=True)
        rates, summaries = [], []
        for number in range(_TIMED_ROUNDS):
            start = time.perf_counter()
            label = f"timed-{candidate.selection}-{number}"
            rids = continue_all(url, plan.prompts, plan.new_tokens, label)
            seconds = time.perf_counter() - start
            rates.append(len(rids) * plan.new_tokens / seconds)
            kept = aspire_block(url)["requests"]
            summaries += [kept[rid] for rid in rids]
        drafts, accepted, verifies = (
            sum(summary[name] for summary in summaries)
            for name in ("draft_steps", "accepted_drafts", "verify_steps")
        )
        length = (accepted + verifies) / verifies
        rate = accepted / drafts if drafts else 0.0
        return Trial("draft context, timed", candidate, length, rate, verifies, max(rates))

    def _switch(self, candidate: Candidate, timed: bool = False) -> None:
        _write(self._config, candidate, self._plan.gamma, timed)
        if not reload_config(self._server.url):
            # On a GPU the lists' memory is sized at start.
            self._server.stop()
            self.start(candidate, timed)


def _write(config: Path, candidate: Candidate, gamma: int, timed: bool) -> None:
    """The settings of a trial: one draft length, or the default schedule where it is timed."""
    config.parent.mkdir(parents=True, exist_ok=True)
    scheduler: dict[str, Any] = {} if timed else {"policy": "fixed", "gamma": gamma}
    config.write_text(
        yaml.safe_dump(
            {"gamma_max": gamma, "context": candidate.settings(), "scheduler": scheduler}
        )
    )


def _short(candidate: Candidate) -> str:
    return (
        f"layer {candidate.refresh_layer}, {candidate.reduction}, "
        f"{candidate.tokens} tokens in pages of {candidate.page_size}"
    )


def written_config(plan: Plan, found: Calibration, provenance: dict[str, Any]) -> str:
    """The configuration file: settings, and in its comments where they come from."""
    best = found.best
    timed = [
        f"{trial.candidate.selection} {trial.tokens_per_s:.1f}"
        for trial in found.trials
        if trial.tokens_per_s is not None
    ]
    today = datetime.date.today().isoformat()
    lines = [
        f"# {plan.model}, calibrated on {today} by `aspire calibrate`.",
        *(f"# {name}: {value}" for name, value in provenance.items()),
        f"# {len(plan.prompts)} texts of {plan.context} tokens on average, greedy, {plan.gamma} "
        f"drafts per verify: accept length {best.accept_length:.2f}, rate {best.rate:.3f} "
        f"({best.verifies} verifies).",
        "# tokens/s with the default schedule: " + ", ".join(timed) + ".",
    ]
    settings = {"gamma_max": plan.gamma, "context": found.fastest.candidate.settings()}
    return "\n".join(lines) + "\n" + yaml.safe_dump(settings, sort_keys=False)
