"""Policies: who drafts, who verifies, and the limit on verify tokens."""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aspire_sglang.speculation.acceptance import (
    AcceptanceEstimator,
    BetaAcceptance,
    EmaAcceptance,
)
from aspire_sglang.speculation.cost_model import CostModel, StepShape
from aspire_sglang.speculation.policies import (
    AspirePolicy,
    AutoregressivePolicy,
    FixedPolicy,
    Policy,
    RowState,
    StaggeredPolicy,
    cap_verify_tokens,
    make_policy,
)

CONTEXT = 10**9
KV_ONLY = CostModel(0.0, 0.0, 1e-9)
"""With a context this long, a verify's own tokens are negligible: T_draft / T_verify is exactly
draft_kv / CONTEXT, the constant c of the paper's formula."""


def row(
    pending: int = 0,
    *,
    c: float = 0.1,
    rate: float = 0.9,
    max_draft: int = 16,
    verifies: int = 5,
    age: int = 0,
    slot: int = 0,
) -> RowState:
    return RowState(CONTEXT, pending, int(c * CONTEXT), rate, max_draft, verifies, age, slot)


def advance(rows: list[RowState], verify: list[bool]) -> list[RowState]:
    """The rows one step later, acceptance left as it is."""
    return [
        replace(r, pending=0, age=0, verifies=r.verifies + 1)
        if v
        else replace(r, pending=r.pending + 1, age=r.age + 1)
        for r, v in zip(rows, verify, strict=True)
    ]


def history(policy: Policy, rows: list[RowState], steps: int) -> list[list[bool]]:
    decisions = []
    for _ in range(steps):
        decisions.append(policy.decide(rows, KV_ONLY))
        rows = advance(rows, decisions[-1])
    return decisions


class TestAutoregressive:
    def test_never_drafts(self) -> None:
        assert AutoregressivePolicy().decide([row(), row(rate=0.99)], KV_ONLY) == [True, True]


class TestFixed:
    def test_the_batch_drafts_and_verifies_together(self) -> None:
        steps = history(FixedPolicy(gamma=3), [row(slot=i) for i in range(4)], 8)
        assert steps == [[False] * 4, [False] * 4, [False] * 4, [True] * 4] * 2

    def test_a_late_row_joins_at_the_next_barrier(self) -> None:
        rows = [row(2), row(0, verifies=0)]
        assert history(FixedPolicy(gamma=3), rows, 6) == [
            [False, False],
            [True, True],
            [False, False],
            [False, False],
            [False, False],
            [True, True],
        ]

    def test_a_short_cap_does_not_shorten_the_others_round(self) -> None:
        rows = [row(), row(max_draft=1), row(max_draft=0)]
        assert history(FixedPolicy(gamma=3), rows, 4) == [
            [False, False, True],
            [False, True, True],
            [False, False, True],
            [True, True, True],
        ]

    def test_no_room_anywhere_is_plain_decoding(self) -> None:
        assert FixedPolicy(gamma=3).decide([row(max_draft=0)] * 2, KV_ONLY) == [True, True]


class TestStaggered:
    @pytest.mark.parametrize(("rows", "gamma"), [(12, 5), (64, 7), (9, 2)])
    def test_an_equal_share_verifies_at_every_step(self, rows: int, gamma: int) -> None:
        steps = history(StaggeredPolicy(gamma), [row(slot=i, verifies=0) for i in range(rows)], 40)
        counts = [sum(step) for step in steps]
        assert max(counts) - min(counts) <= 1
        assert sum(counts) / len(counts) == pytest.approx(rows / (gamma + 1), abs=0.5)

    def test_only_the_first_round_is_short(self) -> None:
        steps = history(StaggeredPolicy(gamma=3), [row(slot=2, verifies=0)], 10)
        assert [step[0] for step in steps] == [False, True] + [False, False, False, True] * 2

    def test_the_cap_holds(self) -> None:
        assert StaggeredPolicy(gamma=5).decide([row(2, max_draft=2)], KV_ONLY) == [True]


class TestAspireRule:
    @pytest.mark.parametrize(
        ("rate", "c", "best"),
        [
            (0.9, 0.1, 10),
            (0.9, 0.3, 5),
            (0.9, 0.5, 3),
            (0.9, 0.7, 2),
            (0.95, 0.1, 15),
            (0.7, 0.3, 2),
        ],
    )
    def test_table_of_optima(self, rate: float, c: float, best: int) -> None:
        assert AspirePolicy().best_lengths([row(rate=rate, c=c)], KV_ONLY) == [best]
        decisions = [AspirePolicy().decide([row(k, rate=rate, c=c)], KV_ONLY)[0] for k in range(17)]
        assert decisions == [k >= best for k in range(17)]

    @settings(deadline=None)
    @given(
        rows=st.lists(
            st.builds(
                RowState,
                committed=st.integers(1, 50_000),
                pending=st.just(0),
                draft_kv=st.integers(1, 4_000),
                rate=st.floats(0.01, 0.995),
                max_draft=st.integers(0, 8),
            ),
            min_size=1,
            max_size=6,
        ),
        buckets=st.sampled_from([(), (1, 2, 4, 8, 16, 32)]),
    )
    def test_equals_the_definition(self, rows: list[RowState], buckets: tuple[int, ...]) -> None:
        cost = CostModel(1e-3, 1e-4, 1e-6, 1e-8, buckets)
        batch = len(rows)
        best = AspirePolicy(gamma_max=6).best_lengths(rows, cost)
        for state, chosen in zip(rows, best, strict=True):
            values = []
            for g in range(min(6, state.max_draft) + 1):
                verify = StepShape()
                draft = StepShape()
                for _ in range(batch):
                    verify = verify.row(g + 1, state.committed + g + 1)
                    draft = draft.row(1, state.draft_kv)
                tokens = (1 - state.rate ** (g + 1)) / (1 - state.rate)
                values.append(tokens / (cost.predict(verify) + g * cost.predict(draft)))
            assert chosen < len(values)
            assert values[chosen] >= max(values) * (1 - 1e-9)

    def test_each_request_gets_its_own_length(self) -> None:
        rows = [row(rate=0.95), row(rate=0.5), row(c=1.0)]
        lengths = AspirePolicy().best_lengths(rows, KV_ONLY)
        assert lengths[0] > lengths[1] > lengths[2] == 0

    def test_graph_padding_changes_the_length(self) -> None:
        # Padded to 4, verifies of 1 to 4 tokens cost about the same and a fifth token costs 4.
        short = [RowState(committed=8, pending=0, draft_kv=0, rate=0.95, max_draft=16, verifies=5)]
        exact = CostModel(0.0, 1.0, 1.0)
        assert AspirePolicy().best_lengths(short, exact)[0] > 6
        assert AspirePolicy().best_lengths(short, replace(exact, buckets=(4, 8, 16))) == [3]

    def test_max_draft_bounds_the_length(self) -> None:
        rows = [row(k, max_draft=4) for k in (3, 4)] + [row(0, max_draft=0)]
        assert AspirePolicy().decide(rows, KV_ONLY) == [False, True, True]

    def test_a_batch_of_nothing(self) -> None:
        assert AspirePolicy().decide([], KV_ONLY) == []


class TestAspireStart:
    @pytest.mark.parametrize("c", [0.1, 0.7])
    def test_first_draft_has_its_own_length(self, c: float) -> None:
        steps = history(AspirePolicy(first_draft=3), [row(verifies=0, c=c)], 5)
        assert [step[0] for step in steps] == [False, False, False, True, False]

    def test_no_first_draft_where_plain_decoding_wins(self) -> None:
        assert AspirePolicy().decide([row(verifies=0, c=1.0)], KV_ONLY) == [True]

    def test_first_draft_respects_the_caps(self) -> None:
        assert AspirePolicy(first_draft=3).decide([row(1, verifies=0, max_draft=1)], KV_ONLY) == [
            True
        ]
        assert AspirePolicy(gamma_max=2).decide([row(2, verifies=0)], KV_ONLY) == [True]


class TestAspireProbe:
    def test_a_plain_request_probes_now_and_then(self) -> None:
        policy = AspirePolicy(probe_interval=4, probe_length=2)
        steps = history(policy, [row(verifies=0, rate=0.1, c=0.5)], 12)
        cycle = [True, True, True, False, False, True]
        assert [step[0] for step in steps] == cycle * 2

    def test_no_probe_where_no_acceptance_could_pay(self) -> None:
        policy = AspirePolicy(probe_interval=4)
        assert all(step[0] for step in history(policy, [row(rate=0.1, c=1.0)], 50))


def closed_loop(
    policy: AspirePolicy, estimator: AcceptanceEstimator, phases: list[tuple[float, int]], c: float
) -> list[list[int]]:
    """Draft lengths of every verify, one list per (true rate, number of verifies) phase."""
    rng = random.Random(13)
    lengths: list[list[int]] = []
    verifies = 0
    for true_rate, count in phases:
        lengths.append([])
        for _ in range(count):
            pending = 0
            while not policy.decide(
                [row(pending, c=c, rate=estimator.rate, verifies=verifies)], KV_ONLY
            )[0]:
                pending += 1
            accepted = 0
            while accepted < pending and rng.random() < true_rate:
                accepted += 1
            if pending:
                estimator.observe(pending, accepted)
            else:
                estimator.decay()
            verifies += 1
            lengths[-1].append(pending)
    return lengths


class TestGammaZero:
    @pytest.mark.parametrize(
        ("policy", "estimator"),
        [
            pytest.param(AspirePolicy(), EmaAcceptance, id="ema"),
            pytest.param(AspirePolicy(), BetaAcceptance, id="beta"),
            pytest.param(AspirePolicy(probe_interval=10**9), EmaAcceptance, id="ema-drift-alone"),
            pytest.param(AspirePolicy(probe_interval=10**9), BetaAcceptance, id="beta-drift-alone"),
            pytest.param(AspirePolicy(), lambda: EmaAcceptance(drift=0.0), id="ema-probe-alone"),
            pytest.param(AspirePolicy(), lambda: BetaAcceptance(drift=0.0), id="beta-probe-alone"),
        ],
    )
    def test_left_again_when_text_becomes_easy(
        self, policy: AspirePolicy, estimator: Callable[[], AcceptanceEstimator]
    ) -> None:
        hard, easy = closed_loop(policy, estimator(), [(0.1, 400), (0.97, 1500)], c=0.5)
        settled = hard[100:]
        assert settled.count(0) / len(settled) > 0.85, "hard text should be decoded plainly"
        late = easy[-200:]
        assert sum(late) / len(late) > 2.0, "easy text should be drafted again"
        assert late.count(0) / len(late) < 0.1

    def test_absorbing_without_either_remedy(self) -> None:
        policy = AspirePolicy(probe_interval=10**9)
        stuck = closed_loop(policy, EmaAcceptance(drift=0.0), [(0.1, 400), (0.97, 1500)], c=0.5)
        assert set(stuck[1]) == {0}, "if this fails, the tests above prove nothing"

    def test_chosen_for_good_when_drafts_cost_as_much_as_verifies(self) -> None:
        (lengths,) = closed_loop(AspirePolicy(), EmaAcceptance(), [(0.97, 500)], c=1.0)
        assert set(lengths) == {0}


any_row = st.builds(
    lambda pending, room, age: RowState(1000, pending, 100, 0.9, pending + room, 1, age),
    pending=st.integers(0, 16),
    room=st.integers(0, 3),
    age=st.integers(0, 40),
)


class TestTokenCap:
    @settings(deadline=None)
    @given(
        rows=st.lists(any_row, min_size=1, max_size=24),
        wants=st.lists(st.booleans(), min_size=24, max_size=24),
        spare=st.integers(0, 120),
    )
    def test_invariants(self, rows: list[RowState], wants: list[bool], spare: int) -> None:
        full = [r.pending >= r.max_draft for r in rows]
        decisions = [want or must for want, must in zip(wants, full, strict=False)]
        limit = len(rows) + spare
        lengths = cap_verify_tokens(decisions, rows, limit)

        assert sum(max(length, 1) for length in lengths) <= limit
        for r, decided, must, length in zip(rows, decisions, full, lengths, strict=True):
            assert 0 <= length <= r.pending + 1
            assert decided or length == 0, "a row that drafts is left alone"
            assert length >= 1 or not must, "a full row verifies"
            assert must or length in (0, r.pending + 1), "only full rows are cut"
        need = sum(r.pending for r, must in zip(rows, full, strict=True) if must)
        if need <= spare:
            assert all(
                length in (0, r.pending + 1) for r, length in zip(rows, lengths, strict=True)
            )
        if sum(r.pending for r, want in zip(rows, decisions, strict=True) if want) <= spare:
            assert [length > 0 for length in lengths] == decisions, "no cap, no change"

    def test_the_oldest_goes_first(self) -> None:
        rows = [row(4, age=4), row(4, age=9), row(4, age=6)]
        assert cap_verify_tokens([True] * 3, rows, 3 + 4) == [0, 5, 0]
        assert cap_verify_tokens([True] * 3, rows, 3 + 8) == [0, 5, 5]

    def test_a_full_row_goes_before_an_older_one_that_can_wait(self) -> None:
        rows = [row(4, age=9), row(4, age=4, max_draft=4)]
        assert cap_verify_tokens([True, True], rows, 2 + 4) == [0, 5]

    def test_too_many_full_rows_cut_the_youngest(self) -> None:
        rows = [row(4, age=age, max_draft=4) for age in (4, 9, 6)]
        assert cap_verify_tokens([True] * 3, rows, 3 + 6) == [1, 5, 3]

    def test_plain_rows_cost_nothing_extra(self) -> None:
        rows = [row(0), row(3, age=3)]
        assert cap_verify_tokens([True, True], rows, 2) == [1, 0]

    def test_nobody_starves(self) -> None:
        rows = [row(max_draft=6, slot=i, rate=0.95, verifies=0) for i in range(16)]
        policy = FixedPolicy(gamma=4)
        waits = []
        for _ in range(300):
            lengths = cap_verify_tokens(policy.decide(rows, KV_ONLY), rows, 2 * len(rows))
            rows = advance(rows, [length > 0 for length in lengths])
            waits.append(max(r.age for r in rows))
        assert max(waits) <= 6
        assert min(r.verifies for r in rows) >= 300 // 7

    def test_wrong_calls_are_refused(self) -> None:
        with pytest.raises(ValueError, match="at least as many tokens"):
            cap_verify_tokens([False] * 3, [row()] * 3, 2)
        with pytest.raises(ValueError, match="2 decisions for 1 rows"):
            cap_verify_tokens([True, True], [row()], 9)
        with pytest.raises(ValueError, match="row 1 may not draft beyond 4"):
            cap_verify_tokens([False, False], [row(), row(4, max_draft=4)], 99)


POLICIES: list[Policy] = [
    AutoregressivePolicy(),
    FixedPolicy(4),
    StaggeredPolicy(4),
    AspirePolicy(8),
]


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
@settings(deadline=None)
@given(rows=st.lists(any_row, max_size=12))
def test_full_rows_always_verify_and_answers_repeat(policy: Policy, rows: list[RowState]) -> None:
    decisions = policy.decide(rows, KV_ONLY)
    assert len(decisions) == len(rows)
    assert all(v for r, v in zip(rows, decisions, strict=True) if r.pending >= r.max_draft)
    assert policy.decide(list(rows), KV_ONLY) == decisions


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
def test_made_by_name(policy: Policy) -> None:
    assert type(make_policy(policy.name)) is type(policy)


def test_options_reach_the_policy() -> None:
    assert make_policy("aspire", gamma_max=4) == AspirePolicy(gamma_max=4)


def test_unknown_policy_names_the_valid_ones() -> None:
    with pytest.raises(ValueError, match="'magic'; valid names: ar, fixed, staggered, aspire"):
        make_policy("magic")


@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("fixed", "gamma"),
        ("staggered", "gamma"),
        ("aspire", "gamma_max"),
        ("aspire", "first_draft"),
        ("aspire", "probe_interval"),
        ("aspire", "probe_length"),
    ],
)
def test_bad_options_are_refused(name: str, option: str) -> None:
    with pytest.raises(ValueError, match=f"{option} must be at least 1"):
        make_policy(name, **{option: 0})
