"""Policies that choose a draft length per request and step, from acceptance and step costs.

Both rules answer the same two questions, how long a draft of each request should be and whether a
pending one should grow; what differs is the objective, and with it the price of time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from aspire_sglang.speculation.acceptance import MAX_RATE
from aspire_sglang.speculation.cost_model import Array, CostModel
from aspire_sglang.speculation.rows import RowState, StepwisePolicy, check_at_least_one

#: Rounding must not break a tie in favour of the longer draft.
_TIE = 1e-12
#: Rounds of the shadow price's fixed point; it converges quadratically.
_PRICE_ROUNDS = 6


class _Rule(Protocol):
    """The two questions, for the rows of one step."""

    @classmethod
    def of(
        cls,
        rows: Sequence[RowState],
        cost: CostModel,
        gamma_max: int,
        batch: int,
        plain_ratio: float = 1.0,
    ) -> Self:
        """Predicted times of the rows, part of a step of ``batch`` rows.

        ``plain_ratio``: what a step takes in which nobody drafts, of what ``cost`` predicts.
        """
        ...

    def best_lengths(self, rates: Array) -> list[int]:
        """The best draft length of every row, 0 for plain decoding."""
        ...

    def pays_to_draft_on(self, rates: Array) -> list[bool]:
        """Whether some longer draft gains more tokens than its time is worth."""
        ...


@dataclass(frozen=True, slots=True)
class _AdaptivePolicy(StepwisePolicy):
    """What the rules have in common: first drafts, and probes where drafting does not pay.

    The first draft of a request has length ``first_draft`` whatever the rule says, as there is no
    acceptance to go by (paper: 3), unless the rule would not draft at all. Where several requests
    are in their first draft, their lengths are spread from 1 to what the rule says, by slot:
    requests that start together would verify together for long, and a step of verifies alone is
    the dearest (ours). And where the best length is 0 (plain decoding is fastest), every
    ``probe_interval``-th verify is preceded by a probe of ``probe_length`` drafts: plain steps tell
    nothing about acceptance, so without probes a request that met one hard passage could decode
    plainly for good (ours). There is no probe where drafts are too slow to pay even if nearly all
    were accepted.

    Args:
        gamma_max: longest draft considered, >= 1 (paper: 16).
        first_draft: drafts before the first verify, >= 1; at most ``gamma_max`` are used.
        probe_interval: verifies from one probe to the next, >= 1.
        probe_length: drafts of a probe, >= 1; at most ``gamma_max`` are used.

    Raises:
        ValueError: an argument is below 1.
    """

    rule: ClassVar[type[_Rule]]
    gamma_max: int = 16
    first_draft: int = 3
    probe_interval: int = 32
    probe_length: int = 1

    def __post_init__(self) -> None:
        check_at_least_one(self.gamma_max, "gamma_max")
        check_at_least_one(self.first_draft, "first_draft")
        check_at_least_one(self.probe_interval, "probe_interval")
        check_at_least_one(self.probe_length, "probe_length")

    def decide(self, rows: Sequence[RowState], cost: CostModel) -> list[bool]:
        """True for rows that hold as many drafts as the rule asks for now."""
        if not rows:
            return []
        rule = self.rule.of(rows, cost, self.gamma_max, len(rows))
        rates = np.array([row.rate for row in rows], dtype=np.float64)
        best = rule.best_lengths(rates)
        drafting_on = rule.pays_to_draft_on(rates)
        together = sum(row.verifies == 0 for row in rows) > 1
        targets = self._runs(rows, rule, best, together)
        for index, row in enumerate(rows):
            if best[index] > 0 and row.verifies > 0:
                targets[index] = row.pending + int(drafting_on[index])
        return [
            row.pending >= min(target, row.max_draft)
            for row, target in zip(rows, targets, strict=True)
        ]

    def _runs(
        self,
        rows: Sequence[RowState],
        rule: _Rule,
        best: Sequence[int],
        together: bool,
        probe: bool | None = None,
    ) -> list[int]:
        """Drafts of a run that starts now: ``best``, but for first drafts and probes.

        ``probe``: whether rows that would not draft probe now; None: by their count of verifies.
        """
        targets = list(best)
        probes = []
        for index, row in enumerate(rows):
            if targets[index] > 0 and row.verifies == 0:
                spread = 1 + row.slot % targets[index]
                targets[index] = spread if together else min(self.first_draft, self.gamma_max)
            elif targets[index] == 0:
                due = (row.verifies + 1) % self.probe_interval == 0
                if due if probe is None else probe:
                    probes.append(index)
        if probes:
            hopeful = rule.best_lengths(np.full(len(rows), MAX_RATE))
            for index in probes:
                if hopeful[index] > 0:
                    targets[index] = min(self.probe_length, self.gamma_max)
        return targets

    def best_lengths(self, rows: Sequence[RowState], cost: CostModel) -> list[int]:
        """The best length of every row alone, without first drafts and probes."""
        rates = np.array([row.rate for row in rows], dtype=np.float64)
        return self.rule.of(rows, cost, self.gamma_max, len(rows)).best_lengths(rates)


@dataclass(frozen=True, slots=True)
class _Runs:
    """The rows' drafts, pending and possible, as arrays.

    Attributes:
        pending: ``[n, 1]``.
        limits: ``[n, 1]`` most drafts of a row.
        survival: ``[n, 1]`` probability that all pending drafts are accepted.
        longest: most drafts that any row may hold.
    """

    pending: NDArray[np.int64]
    limits: NDArray[np.int64]
    survival: Array
    longest: int

    @classmethod
    def of(cls, rows: Sequence[RowState], gamma_max: int) -> Self:
        survival = [row.rate**row.pending if row.survival is None else row.survival for row in rows]
        return cls(
            np.array([row.pending for row in rows], dtype=np.int64)[:, None],
            np.array([row.max_draft for row in rows], dtype=np.int64)[:, None],
            np.array(survival, dtype=np.float64)[:, None],
            gamma_max,
        )

    def expected(self, rates: Array) -> Array:
        """``[n, G + 1]`` expected committed tokens of a verify of g drafts; -inf beyond limits."""
        drafts = np.arange(self.longest + 1)
        # The sum of powers equals (1 - a**(g+1)) / (1 - a) and also holds at a = 1.
        tokens = np.cumsum(rates[:, None] ** drafts, axis=1)
        return np.where(drafts <= self.limits, tokens, -np.inf)

    def gain(self, rates: Array) -> Array:
        """``[n, G]`` additional tokens expected of 1, 2, ... drafts behind the pending ones."""
        more = np.arange(1, self.longest + 1)
        gain: Array = self.survival * np.cumsum(rates[:, None] ** more, axis=1)
        return gain

    def additional(self, verify: Array) -> Array:
        """``[n, G]`` additional verify time of 1, 2, ... drafts behind the pending ones."""
        more = np.arange(1, self.longest + 1)
        now = np.take_along_axis(verify, np.minimum(self.pending, self.longest), axis=1)
        then = np.take_along_axis(verify, np.minimum(self.pending + more, self.longest), axis=1)
        return then - now

    def any_pays(self, gain: Array, price: Array) -> list[bool]:
        """Whether some number of further drafts that is allowed gains more than its price."""
        more = np.arange(1, self.longest + 1)
        allowed = self.pending + more <= np.minimum(self.limits, self.longest)
        pays: NDArray[np.bool_] = (gain > price * (1.0 + _TIE)) & allowed
        return [bool(row.any()) for row in pays]


def _reads(rows: Sequence[RowState], gamma_max: int) -> tuple[Array, Array, Array]:
    """Of 0, 1, ... drafts: ``[G + 1]`` queries of the verify, ``[n, G + 1]`` tokens it reads; and
    ``[n, 1]`` tokens that a draft reads."""
    committed = np.array([row.committed for row in rows], dtype=np.float64)[:, None]
    draft_kv = np.array([row.draft_kv for row in rows], dtype=np.float64)[:, None]
    queries = np.arange(1, gamma_max + 2, dtype=np.float64)
    return queries, committed + queries, draft_kv


@dataclass(frozen=True, slots=True)
class Throughput:
    """Each request maximizes the throughput of a batch of requests like itself.

    Attributes:
        runs: the rows' drafts.
        verify: ``[n, G + 1]`` seconds of a verify step of that many drafts.
        draft: ``[n, 1]`` seconds of a draft step.
    """

    runs: _Runs
    verify: Array
    draft: Array

    @classmethod
    def of(
        cls,
        rows: Sequence[RowState],
        cost: CostModel,
        gamma_max: int,
        batch: int,
        plain_ratio: float = 1.0,
    ) -> Self:
        queries, context, draft_kv = _reads(rows, gamma_max)
        verify = cost.predict_many(batch * queries, batch * context, batch * queries * context)
        verify[:, 0] *= plain_ratio
        one_token = np.array(float(batch))
        draft = cost.predict_many(one_token, batch * draft_kv, batch * draft_kv)
        return cls(_Runs.of(rows, gamma_max), verify, draft)

    def throughput(self, rates: Array) -> Array:
        """``[n, G + 1]`` expected tokens per second of each draft length."""
        drafts = np.arange(self.verify.shape[1])
        throughput: Array = self.runs.expected(rates) / (self.verify + drafts * self.draft)
        return throughput

    def best_lengths(self, rates: Array) -> list[int]:
        best: list[int] = np.argmax(self.throughput(rates), axis=1).tolist()
        return best

    def pays_to_draft_on(self, rates: Array) -> list[bool]:
        price = self.throughput(rates).max(axis=1, keepdims=True)
        more = np.arange(1, self.verify.shape[1])
        time = more * self.draft + self.runs.additional(self.verify)
        return self.runs.any_pays(self.runs.gain(rates), price * time)


@dataclass(frozen=True, slots=True)
class _ShadowPrice:
    """All requests together maximize the tokens per second of the server.

    Attributes:
        runs: the rows' drafts.
        fixed: seconds of a step, whatever is in it.
        verify: ``[n, G + 1]`` seconds that a verify row of that many drafts adds to its step.
        draft: ``[n, 1]`` seconds that a draft row adds.
    """

    runs: _Runs
    fixed: float
    verify: Array
    draft: Array

    @classmethod
    def of(
        cls,
        rows: Sequence[RowState],
        cost: CostModel,
        gamma_max: int,
        batch: int,
        plain_ratio: float = 1.0,
    ) -> Self:
        fixed, per_token, per_kv, per_pair = cost.coefficients
        queries, context, draft_kv = _reads(rows, gamma_max)
        verify = per_token * queries + per_kv * context + per_pair * queries * context
        draft = per_token + (per_kv + per_pair) * draft_kv
        return cls(_Runs.of(rows, gamma_max), fixed, verify, draft)

    def solve(self, rates: Array) -> tuple[float, Array]:
        """The price of a second in tokens, and ``[n, G + 1]`` the value of each length per step.

        Dinkelbach's method for the ratio ``sum_i E_i / (g_i + 1)`` over
        ``fixed + sum_i M_i / (g_i + 1)``: at a price ``L``, every request maximizes
        ``(E_i(g) - L * M_i(g)) / (g + 1)`` by itself, and the ratio of these lengths is the next
        price. Prices rise to the maximum, starting from that of plain decoding.
        """
        drafts = np.arange(self.verify.shape[1])
        steps = drafts + 1.0
        tokens = self.runs.expected(rates)
        times = self.verify + drafts * self.draft
        rows = np.arange(len(rates))
        best = np.zeros(len(rates), dtype=np.int64)
        price = 0.0
        for _ in range(_PRICE_ROUNDS):
            chosen = tokens[rows, best] / steps[best], times[rows, best] / steps[best]
            price = float(chosen[0].sum() / (self.fixed + chosen[1].sum()))
            value = (tokens - price * times) / steps
            lengths = np.argmax(value, axis=1)
            if np.array_equal(lengths, best):
                break
            best = lengths
        return price, value

    def best_lengths(self, rates: Array) -> list[int]:
        _, value = self.solve(rates)
        best: list[int] = np.argmax(value, axis=1).tolist()
        return best

    def pays_to_draft_on(self, rates: Array) -> list[bool]:
        price, value = self.solve(rates)
        more = np.arange(1, self.verify.shape[1])
        time = more * self.draft + self.runs.additional(self.verify)
        # A step spent on this run is not spent on the next ones, which earn so much per step.
        forgone = more * value.max(axis=1, keepdims=True)
        return self.runs.any_pays(self.runs.gain(rates), price * time + forgone)


@dataclass(frozen=True, slots=True)
class AspirePolicy(_AdaptivePolicy):
    """The ASPIRE rule (arXiv 2609.17943): each draft length maximizes its request's throughput.

    For request i, gamma_i is the g in 0..min(gamma_max, max_draft) with the highest
    ``E(g) / (T_verify(g) + g * T_draft)``, where ``E(g) = (1 - a**(g+1)) / (1 - a)`` is the
    expected number of committed tokens at acceptance a, and the times are predicted for a batch of
    B = len(rows) copies of request i: B tokens over ``B * draft_kv`` KV tokens for a draft step;
    ``B * (g+1)`` tokens over ``B * (S+g+1)`` KV tokens for a verify. The row verifies as soon as
    it holds gamma_i drafts. Ties go to the shorter draft.

    With pending drafts, what is known of them counts: the highest throughput is the price of time,
    and the row drafts on while some longer draft is expected to gain more tokens than its
    additional time is worth, the pending run surviving with probability ``survival``. For
    ``survival = a ** pending`` this is the rule above (ours).
    """

    name: ClassVar[str] = "aspire"
    plans: ClassVar[bool] = True
    rule: ClassVar[type[_Rule]] = Throughput

    def plan(
        self,
        rows: Sequence[RowState],
        cost: CostModel,
        batch: int,
        together: bool,
        plain_ratio: float = 1.0,
        probe: bool | None = None,
    ) -> list[int]:
        """See :class:`Policy`."""
        rule = self.rule.of(rows, cost, self.gamma_max, batch, plain_ratio)
        rates = np.array([row.rate for row in rows], dtype=np.float64)
        best = rule.best_lengths(rates)
        alone = len(rows) == batch and not any(best)
        return self._runs(rows, rule, best, together, probe if alone else None)

    def until_probe(self, verifies: int) -> int:
        """See :class:`Policy`."""
        return self.probe_interval - 1 - (verifies + 1) % self.probe_interval


@dataclass(frozen=True, slots=True)
class ShadowPricePolicy(_AdaptivePolicy):
    """Draft lengths that maximize the tokens per second of the whole batch (ours).

    Every running request is in every step, so a request that commits ``E_i(g)`` tokens in
    ``g + 1`` steps, adding ``M_i(g)`` seconds to them, makes the server's throughput
    ``sum_i E_i / (g_i + 1) / (fixed + sum_i M_i / (g_i + 1))``. At its maximum L every request
    maximizes ``(E_i(g) - L * M_i(g)) / (g + 1)``: it pays the going price for the time of its own
    rows and shares the fixed part of a step with all others, whereas the paper's rule lets each
    request pay for a batch of its like.

    A pending run grows while some further drafts are expected to gain more tokens than their time
    costs at that price and than the steps they take would earn otherwise (optimal stopping of a
    renewal-reward process). Token counts are not padded to buckets here: what a row adds to a step
    is its share of the slope, not of the stair it happens to stand on.
    """

    name: ClassVar[str] = "shadow_price"
    rule: ClassVar[type[_Rule]] = _ShadowPrice
