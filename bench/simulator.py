"""Policies on simulated requests: known acceptance, known step costs, no model.

    python bench/simulator.py                       # the mixed batch of the defaults
    python bench/simulator.py --requests 256 --contexts 1000 30000 --rates 0.6 0.98 --fixed 2e-3

Every figure it prints is simulated. Requests differ in context and in how well their drafts are
accepted, which changes from stretch to stretch of a text; policies see only what a server sees:
the accept lengths of the past. The oracle knows the acceptance of the moment.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from aspire_sglang.speculation.ablations import adjusted_length
from aspire_sglang.speculation.acceptance import (
    MAX_RATE,
    MIN_RATE,
    AcceptanceEstimator,
    BetaAcceptance,
)
from aspire_sglang.speculation.cost_model import CostModel, StepShape
from aspire_sglang.speculation.policies import Policy, RowState, make_policy

#: Fitted by an ASPIRE server at start-up, SmolLM2-135M in float32 on two Zen 5 cores.
TWO_CORES = CostModel(28.3e-3, 0.727e-3, 2.06e-6, 0.128e-6)


LAYERS = 30
"""Of SmolLM2-135M, one of which reads the whole context at every draft."""


@dataclass(frozen=True)
class Workload:
    """Requests that run for the whole simulation.

    Attributes:
        requests: how many run at once.
        contexts: least and most tokens of a context; spread evenly over the requests, or over
            the logarithm if ``log``.
        rates: lowest and highest acceptance of a stretch; drawn per stretch.
        stretch: mean committed tokens of a stretch.
        ratio, floor: a draft reads this share of the context, at least ``floor`` tokens.
        refreshing: share of the layers in which a draft reads the whole context.
        prompts: tokens of every context, instead of ``contexts``.
        new_tokens: of every request; 0: requests run for the whole simulation.
        waves: requests per place, one after another; with more than one, those that run at the
            beginning are met in their midst, as in ``bench/gpu_waves.py``.
    """

    requests: int = 8
    contexts: tuple[int, int] = (500, 7500)
    rates: tuple[float, float] = (0.7, 0.99)
    stretch: float = 200.0
    ratio: float = 0.1
    floor: int = 512
    refreshing: float = 0.0
    log: bool = False
    prompts: tuple[int, ...] = ()
    new_tokens: int = 0
    waves: int = 1

    def draft_kv(self, context: int) -> int:
        """KV tokens that a draft reads, per layer."""
        sparse = min(context, max(self.floor, int(self.ratio * context)))
        return round(sparse + self.refreshing * (context - sparse))

    def lengths(self) -> list[int]:
        """Tokens of the contexts of one wave."""
        lengths: list[int]
        low, high = self.contexts
        if self.prompts:
            lengths = list(self.prompts)
        elif self.log:
            shares = (np.arange(self.requests) + 0.5) / self.requests
            lengths = np.round(low * (high / low) ** shares).astype(int).tolist()
        else:
            lengths = np.linspace(low, high, self.requests).astype(int).tolist()
        return lengths


@dataclass
class _Request:
    committed: int
    slot: int
    estimator: AcceptanceEstimator
    rate: float
    pending: int = 0
    accepted: int = 0
    rejected: bool = False
    verifies: int = 0
    age: int = 0
    length: int = 3
    trace: Sequence[bool] = ()
    place: int = 0
    left: float = math.inf

    def accepts_next(self, draw: float) -> bool:
        """Whether the draft behind the pending ones would be accepted."""
        if not self.trace:
            return draw < self.rate
        return self.trace[(self.place + self.pending) % len(self.trace)]

    def known_rate(self) -> float:
        """The acceptance of the moment; of a trace, its mean."""
        if not self.trace:
            return self.rate
        return min(max(sum(self.trace) / len(self.trace), MIN_RATE), MAX_RATE)

    def known_run(self, longest: int) -> int:
        """Drafts from here on that would be accepted, at most ``longest``."""
        run = 0
        while run < longest and self.trace[(self.place + run) % len(self.trace)]:
            run += 1
        return run


@dataclass
class Outcome:
    """Totals of a simulated run.

    Attributes:
        tokens, seconds: committed tokens and time of all steps.
        full_tokens, full_seconds: of those in which every place was taken.
        lengths: draft lengths at verifies.
    """

    tokens: int = 0
    seconds: float = 0.0
    full_tokens: int = 0
    full_seconds: float = 0.0
    lengths: list[int] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Committed tokens per second."""
        return self.tokens / self.seconds

    @property
    def full_rate(self) -> float:
        """Committed tokens per second while every place was taken."""
        return self.full_tokens / self.full_seconds

    def step(self, tokens: int, seconds: float, full: bool) -> None:
        """Count one step."""
        self.tokens += tokens
        self.seconds += seconds
        if full:
            self.full_tokens += tokens
            self.full_seconds += seconds


def simulate(
    policy: Policy,
    work: Workload,
    cost: CostModel,
    steps: int,
    *,
    seed: int = 0,
    oracle: bool = False,
    gamma_max: int = 16,
    make_estimator: Callable[[], AcceptanceEstimator] = BetaAcceptance,
    traces: Sequence[Sequence[bool]] = (),
) -> Outcome:
    """Run a policy for some steps.

    Args:
        cost: of the simulated machine, and what the policy believes it to be.
        oracle: tell the policy the present acceptance instead of the estimate; of a trace its mean
            and, as ``length``, the number of drafts that will be accepted.
        traces: recorded outcomes of the requests' drafts, one after another, in place of
            ``work.rates``; a request without one takes the next in turn. What would have been
            drafted behind a token that the trace has and the replay has not is unknown, so outcomes
            are taken to depend on the place in the text alone.
    """
    rng = np.random.default_rng(seed)
    coming = _requests(work, make_estimator, traces, rng, seed)
    running = list(itertools.islice(coming, work.requests))
    done = Outcome()
    for _ in range(steps):
        if not running:
            break
        rows = [_row(request, work, gamma_max, oracle) for request in running]
        shape, committed, staying = StepShape(), 0, []
        full = len(running) == work.requests
        for request, row, verify in zip(running, rows, policy.decide(rows, cost), strict=True):
            if not verify:
                shape = shape.row(1, row.draft_kv)
                request.rejected |= not request.accepts_next(rng.random())
                request.pending += 1
                request.age += 1
                request.accepted += not request.rejected
                staying.append(request)
                continue
            queries = request.pending + 1
            shape = shape.row(queries, request.committed + queries)
            done.lengths.append(request.pending)
            tokens = _verify(request)
            committed += tokens
            if rng.random() < tokens / work.stretch:
                request.rate = rng.uniform(*work.rates)
            request.place += tokens
            request.left -= tokens
            request.pending, request.accepted, request.rejected = 0, 0, False
            if request.left > 0:
                staying.append(request)
            elif (after := next(coming, None)) is not None:
                after.slot = request.slot
                staying.append(after)
        done.step(committed, cost.predict(shape), full)
        running = staying
    return done


def _requests(
    work: Workload,
    make_estimator: Callable[[], AcceptanceEstimator],
    traces: Sequence[Sequence[bool]],
    rng: np.random.Generator,
    seed: int,
) -> Iterator[_Request]:
    """Wave after wave."""
    lengths = work.lengths()
    for wave in range(work.waves):
        order = list(range(len(lengths)))
        if wave > 0:
            rng.shuffle(order)
        for slot, index in enumerate(order):
            trace = traces[(index + seed * len(lengths)) % len(traces)] if traces else ()
            request = _Request(
                lengths[index], slot, make_estimator(), rng.uniform(*work.rates), trace=trace
            )
            if work.new_tokens:
                met_midway = wave == 0 and work.waves > 1
                least = 1 if met_midway else work.new_tokens
                request.left = int(rng.integers(least, work.new_tokens + 1))
            yield request


def _row(request: _Request, work: Workload, gamma_max: int, oracle: bool) -> RowState:
    context = request.committed + request.pending
    return RowState(
        committed=request.committed,
        pending=request.pending,
        draft_kv=work.draft_kv(context),
        rate=request.known_rate() if oracle else request.estimator.rate,
        max_draft=int(max(min(gamma_max, request.left - 1), 0)),
        verifies=request.verifies,
        age=request.age,
        slot=request.slot,
        length=request.known_run(gamma_max) if oracle and request.trace else request.length,
    )


def _verify(request: _Request) -> int:
    """Commit the accepted drafts and one token more; contexts keep their length."""
    if request.pending:
        request.estimator.observe(request.pending, request.accepted)
        request.length = adjusted_length(request.length, request.pending, request.accepted)
    else:
        request.estimator.decay()
    request.verifies += 1
    request.age = 0
    return request.accepted + 1


def compare(work: Workload, cost: CostModel, steps: int, seeds: Sequence[int]) -> dict[str, float]:
    """Mean tokens per second of every policy, with all places taken where requests follow one
    another; fixed lengths at their best."""

    def mean(policy: Policy, oracle: bool = False) -> float:
        runs = [simulate(policy, work, cost, steps, seed=seed, oracle=oracle) for seed in seeds]
        return float(np.mean([run.full_rate if work.waves > 1 else run.rate for run in runs]))

    lengths = (1, 2, 3, 4, 6, 8, 10, 12, 16)
    return {
        "plain": mean(make_policy("ar")),
        "fixed, best length": max(mean(make_policy("fixed", gamma=g)) for g in lengths),
        "staggered, best length": max(mean(make_policy("staggered", gamma=g)) for g in lengths),
        "aspire": mean(make_policy("aspire")),
        "shadow_price": mean(make_policy("shadow_price")),
        "aspire, oracle": mean(make_policy("aspire", first_draft=16), oracle=True),
        "oracle": mean(make_policy("shadow_price", first_draft=16), oracle=True),
    }


def main() -> None:
    """Print the comparison for one workload."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=Workload.requests)
    parser.add_argument("--contexts", type=int, nargs=2, default=Workload.contexts)
    parser.add_argument("--rates", type=float, nargs=2, default=Workload.rates)
    parser.add_argument("--stretch", type=float, default=Workload.stretch, help="tokens")
    parser.add_argument("--ratio", type=float, default=Workload.ratio, help="sparse budget")
    parser.add_argument("--fixed", type=float, default=TWO_CORES.fixed, help="seconds per step")
    parser.add_argument("--per-token", type=float, default=TWO_CORES.per_token)
    parser.add_argument("--per-kv", type=float, default=TWO_CORES.per_kv)
    parser.add_argument("--per-pair", type=float, default=TWO_CORES.per_pair)
    parser.add_argument("--log", action="store_true", help="contexts spread over the logarithm")
    parser.add_argument("--new-tokens", type=int, default=0, help="of a request; 0: no end")
    parser.add_argument("--waves", type=int, default=1, help="requests per place")
    parser.add_argument("--steps", type=int, default=2000, help="at most")
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    work = Workload(
        options.requests,
        tuple(options.contexts),
        tuple(options.rates),
        options.stretch,
        options.ratio,
        log=options.log,
        new_tokens=options.new_tokens,
        waves=options.waves,
    )
    cost = CostModel(options.fixed, options.per_token, options.per_kv, options.per_pair)
    found = compare(work, cost, options.steps, range(options.seeds))
    print("simulated tokens/s")
    for name, rate in found.items():
        share = rate / found["oracle"]
        print(
            f"{name:24}{rate:10.1f}{rate / found['plain']:8.2f} x plain{share:8.1%} of the oracle"
        )


if __name__ == "__main__":
    main()
