"""Who drafts and who verifies in the next forward.

A policy sees every running request and answers, for each, True (verify) or False (draft one more
token). Its answer is a function of its arguments alone, so tensor-parallel ranks agree without
talking. A row with no room to draft (``pending >= max_draft``) always verifies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from aspire_sglang.speculation.acceptance import MAX_RATE
from aspire_sglang.speculation.cost_model import Array, CostModel

#: Rounding must not break a tie in favour of the longer draft.
_TIE = 1e-12


@dataclass(frozen=True, slots=True)
class RowState:
    """One running request, as a policy sees it.

    Attributes:
        committed: S, tokens whose KV is final (full attention).
        pending: k, drafts waiting for a verify.
        draft_kv: KV tokens that a draft row of this request reads.
        rate: estimated probability, in (0, 1), that its next draft is accepted.
        max_draft: most drafts it may hold now (output and context limits included); 0: none.
        verifies: verifies it has had, plain steps among them.
        age: steps since its last verify.
        slot: a number that it keeps while it runs; used to spread requests over phases.
        survival: estimated probability that all its pending drafts are accepted; None to take
            ``rate ** pending``.
    """

    committed: int
    pending: int
    draft_kv: int
    rate: float
    max_draft: int
    verifies: int = 0
    age: int = 0
    slot: int = 0
    survival: float | None = None


class Policy(Protocol):
    """Decides, for every running request, between drafting and verifying."""

    name: ClassVar[str]

    def decide(self, rows: Sequence[RowState], cost: CostModel) -> list[bool]:
        """One answer per row, in order: True to verify, False to draft."""
        ...


@dataclass(frozen=True, slots=True)
class AutoregressivePolicy:
    """Plain decoding: every row verifies at every step, so no draft ever starts."""

    name: ClassVar[str] = "ar"

    def decide(self, rows: Sequence[RowState], cost: CostModel) -> list[bool]:
        """True for every row."""
        return [True] * len(rows)


@dataclass(frozen=True, slots=True)
class FixedPolicy:
    """Synchronized speculation: the batch drafts ``gamma`` tokens, then every row verifies.

    The barrier falls when the row furthest ahead has ``gamma`` drafts (or the most that any row
    may hold, if that is less). A row that joined in mid-round verifies there with the drafts it
    has and is in step from then on. A row with a smaller cap verifies whenever it reaches the cap,
    as it may not draft on, and again at the barrier.

    Args:
        gamma: drafts per round, >= 1.

    Raises:
        ValueError: ``gamma < 1``.
    """

    name: ClassVar[str] = "fixed"
    gamma: int = 5

    def __post_init__(self) -> None:
        _check_at_least_one(self.gamma, "gamma")

    def decide(self, rows: Sequence[RowState], cost: CostModel) -> list[bool]:
        """True for every row at the barrier, else for rows at their cap."""
        stride = min(self.gamma, max((row.max_draft for row in rows), default=0))
        barrier = any(row.pending >= stride for row in rows)
        return [barrier or row.pending >= row.max_draft for row in rows]


@dataclass(frozen=True, slots=True)
class StaggeredPolicy:
    """Fixed stride with spread phases: about B/(gamma + 1) of B rows verify at each step.

    SparseSpec's unified schedule (arXiv 2512.01278). The first round of a row is cut short to
    ``gamma - slot % (gamma + 1)`` drafts, and all later rounds have ``gamma``; so rows that start
    together in neighbouring slots stay one step apart.

    Args:
        gamma: drafts per round, >= 1.

    Raises:
        ValueError: ``gamma < 1``.
    """

    name: ClassVar[str] = "staggered"
    gamma: int = 5

    def __post_init__(self) -> None:
        _check_at_least_one(self.gamma, "gamma")

    def decide(self, rows: Sequence[RowState], cost: CostModel) -> list[bool]:
        """True for rows at the end of their round or at their cap."""
        return [row.pending >= min(self._stride(row), row.max_draft) for row in rows]

    def _stride(self, row: RowState) -> int:
        return self.gamma - (row.slot % (self.gamma + 1) if row.verifies == 0 else 0)


@dataclass(frozen=True, slots=True)
class AspirePolicy:
    """The ASPIRE rule (arXiv 2609.17943): each draft length maximizes its request's throughput.

    For request i, gamma_i is the g in 0..min(gamma_max, max_draft) with the highest
    ``E(g) / (T_verify(g) + g * T_draft)``, where ``E(g) = (1 - a**(g+1)) / (1 - a)`` is the
    expected number of committed tokens at acceptance a, and the times are predicted for a batch of
    B = len(rows) copies of request i: B tokens over ``B * draft_kv`` KV tokens for a draft step;
    ``B * (g+1)`` tokens over ``B * (S+g+1)`` KV tokens for a verify. The row verifies as soon as
    it holds gamma_i drafts. Ties go to the shorter draft.

    Three additions. With pending drafts, what is known of them counts: the highest throughput is
    the price of time, and the row drafts on while some longer draft is expected to gain more
    tokens than its additional time is worth, the pending run surviving with probability
    ``survival``. For ``survival = a ** pending`` this is the rule above (ours). The first draft of
    a request has length ``first_draft`` whatever the rule says, as there is no acceptance to go by
    (paper: 3), unless the rule would not draft at all. And where gamma_i is 0 (plain decoding is
    fastest), every ``probe_interval``-th verify is preceded by a probe of ``probe_length`` drafts:
    plain steps tell nothing about acceptance, so without probes a request that met one hard
    passage could decode plainly for good (ours). There is no probe where drafts are too slow to
    pay even if nearly all were accepted.

    Args:
        gamma_max: longest draft considered, >= 1 (paper: 16).
        first_draft: drafts before the first verify, >= 1; at most ``gamma_max`` are used.
        probe_interval: verifies from one probe to the next, >= 1.
        probe_length: drafts of a probe, >= 1; at most ``gamma_max`` are used.

    Raises:
        ValueError: an argument is below 1.
    """

    name: ClassVar[str] = "aspire"
    gamma_max: int = 16
    first_draft: int = 3
    probe_interval: int = 32
    probe_length: int = 1

    def __post_init__(self) -> None:
        _check_at_least_one(self.gamma_max, "gamma_max")
        _check_at_least_one(self.first_draft, "first_draft")
        _check_at_least_one(self.probe_interval, "probe_interval")
        _check_at_least_one(self.probe_length, "probe_length")

    def decide(self, rows: Sequence[RowState], cost: CostModel) -> list[bool]:
        """True for rows that hold as many drafts as the rule asks for now."""
        terms = _Terms.of(rows, cost, self.gamma_max)
        rates = np.array([row.rate for row in rows], dtype=np.float64)
        targets = terms.best_lengths(rates)
        drafting_on = terms.pays_to_draft_on(rows, rates)
        probes = []
        for index, row in enumerate(rows):
            if targets[index] > 0 and row.verifies == 0:
                targets[index] = min(self.first_draft, self.gamma_max)
            elif targets[index] > 0:
                targets[index] = row.pending + int(drafting_on[index])
            elif targets[index] == 0 and (row.verifies + 1) % self.probe_interval == 0:
                probes.append(index)
        if probes:
            hopeful = terms.best_lengths(np.full(len(rows), MAX_RATE))
            for index in probes:
                if hopeful[index] > 0:
                    targets[index] = min(self.probe_length, self.gamma_max)
        return [
            row.pending >= min(target, row.max_draft)
            for row, target in zip(rows, targets, strict=True)
        ]

    def best_lengths(self, rows: Sequence[RowState], cost: CostModel) -> list[int]:
        """gamma_i of every row: the maximum alone, without first drafts and probes."""
        rates = np.array([row.rate for row in rows], dtype=np.float64)
        return _Terms.of(rows, cost, self.gamma_max).best_lengths(rates)


@dataclass(frozen=True, slots=True)
class _Terms:
    """Predicted times of the ASPIRE rule for ``n`` rows and draft lengths ``0..G``.

    Attributes:
        verify: ``[n, G + 1]`` seconds of a verify step of that many drafts.
        draft: ``[n, 1]`` seconds of a draft step.
        limits: ``[n, 1]`` most drafts of a row.
    """

    verify: Array
    draft: Array
    limits: NDArray[np.int64]

    @classmethod
    def of(cls, rows: Sequence[RowState], cost: CostModel, gamma_max: int) -> _Terms:
        batch = len(rows)
        committed = np.array([row.committed for row in rows], dtype=np.float64)[:, None]
        draft_kv = np.array([row.draft_kv for row in rows], dtype=np.float64)[:, None]
        limits = np.array([row.max_draft for row in rows], dtype=np.int64)[:, None]
        queries = np.arange(1, gamma_max + 2, dtype=np.float64)
        context = committed + queries
        verify = cost.predict_many(batch * queries, batch * context, batch * queries * context)
        one_token = np.array(float(batch))
        draft = cost.predict_many(one_token, batch * draft_kv, batch * draft_kv)
        return cls(verify, draft, limits)

    def throughput(self, rates: Array) -> Array:
        """``[n, G + 1]`` expected tokens per second of each draft length; -inf beyond the limit."""
        drafts = np.arange(self.verify.shape[1])
        # The sum of powers equals (1 - a**(g+1)) / (1 - a) and also holds at a = 1.
        expected = np.cumsum(rates[:, None] ** drafts, axis=1)
        times = self.verify + drafts * self.draft
        return np.where(drafts <= self.limits, expected / times, -np.inf)

    def best_lengths(self, rates: Array) -> list[int]:
        best: list[int] = np.argmax(self.throughput(rates), axis=1).tolist()
        return best

    def pays_to_draft_on(self, rows: Sequence[RowState], rates: Array) -> list[bool]:
        """Whether some longer draft gains more tokens than its time is worth at the best rate."""
        price = self.throughput(rates).max(axis=1, keepdims=True)
        more = np.arange(1, self.verify.shape[1])
        pending = np.array([row.pending for row in rows], dtype=np.int64)[:, None]
        survival = np.array(
            [row.rate**row.pending if row.survival is None else row.survival for row in rows]
        )
        gain = survival[:, None] * np.cumsum(rates[:, None] ** more, axis=1)
        longest = self.verify.shape[1] - 1
        now = np.take_along_axis(self.verify, np.minimum(pending, longest), axis=1)
        then = np.take_along_axis(self.verify, np.minimum(pending + more, longest), axis=1)
        worth = gain > price * (more * self.draft + then - now) * (1.0 + _TIE)
        allowed = pending + more <= np.minimum(self.limits, longest)
        pays: list[bool] = (worth & allowed).any(axis=1).tolist()
        return pays


_POLICIES: dict[str, Callable[..., Policy]] = {
    AutoregressivePolicy.name: AutoregressivePolicy,
    FixedPolicy.name: FixedPolicy,
    StaggeredPolicy.name: StaggeredPolicy,
    AspirePolicy.name: AspirePolicy,
}


def make_policy(name: str, **options: Any) -> Policy:
    """Build the policy called ``name`` with its keyword ``options``.

    Raises:
        ValueError: no policy has that name, or an option is outside its range.
        TypeError: the policy has no such option.
    """
    if name not in _POLICIES:
        raise ValueError(f"unknown policy {name!r}; valid names: {', '.join(_POLICIES)}")
    return _POLICIES[name](**options)


def cap_verify_tokens(
    decisions: Sequence[bool], rows: Sequence[RowState], max_tokens: int
) -> list[int]:
    """Fit a policy's decisions into a forward of at most ``max_tokens`` query tokens.

    Returns, per row, 0 for a draft row (1 token) or the number of query tokens of its verify row:
    the bonus token and its first drafts. The total never exceeds ``max_tokens``.

    Rows that may not draft on are served first, then the other verifies, each group oldest first
    (ties in row order). A verify that does not fit is put off, and its row drafts instead; it can
    do so only until it reaches ``max_draft``, so nobody starves. If the rows at ``max_draft``
    alone exceed the limit, the youngest of them verify fewer drafts than they hold; the others
    of their drafts must be dropped, which costs work and never changes the output. This is rare
    when ``max_tokens`` is at least twice the number of rows.

    Args:
        decisions: one answer of ``Policy.decide`` per row.
        rows: the rows, in the same order.
        max_tokens: most query tokens in the forward.

    Raises:
        ValueError: fewer ``max_tokens`` than rows, different lengths, or a decision to draft for a
            row that holds ``max_draft`` drafts.
    """
    if len(decisions) != len(rows):
        raise ValueError(f"{len(decisions)} decisions for {len(rows)} rows")
    if max_tokens < len(rows):
        raise ValueError(f"{len(rows)} rows need at least as many tokens, got {max_tokens}")
    forced = [row.pending >= row.max_draft for row in rows]
    for index, (verify, must) in enumerate(zip(decisions, forced, strict=True)):
        if must and not verify:
            raise ValueError(f"row {index} may not draft beyond {rows[index].max_draft}")

    spare = max_tokens - len(rows)
    lengths = [0] * len(rows)
    verifying = [index for index, verify in enumerate(decisions) if verify]
    for index in sorted(verifying, key=lambda i: (not forced[i], -rows[i].age, i)):
        pending = rows[index].pending
        if pending <= spare or forced[index]:
            drafts = min(pending, spare)
            lengths[index] = drafts + 1
            spare -= drafts
    return lengths


def _check_at_least_one(value: int, name: str) -> None:
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")
