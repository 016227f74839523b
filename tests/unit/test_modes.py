"""Runs decided on when they start are the runs that step-by-step decisions would make."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("torch")

from aspire_sglang.config import SchedulerConfig
from aspire_sglang.context.selection import SelectionConfig
from aspire_sglang.context.sparse import RefreshConfig, SparseContext
from aspire_sglang.runtime import modes as module
from aspire_sglang.runtime.cost import RunningCost
from aspire_sglang.runtime.draft_state import DraftState
from aspire_sglang.runtime.modes import PLAIN_RUN, ModeScheduler
from aspire_sglang.speculation.acceptance import make_estimator
from aspire_sglang.speculation.adaptive import AspirePolicy
from aspire_sglang.speculation.cost_model import CostModel

KV_BOUND = CostModel(1e-3, 1e-6, 1e-8)
TOKEN_BOUND = CostModel(1e-3, 1e-4, 1e-12)
LONG_CONTEXTS = CostModel(1e-3, 1e-6, 1e-7)
GAMMA = 12


def scheduler(cost: CostModel) -> tuple[ModeScheduler, DraftState]:
    context = SparseContext(
        SelectionConfig(),
        RefreshConfig("refresh", 1, True),
        num_layers=4,
        num_slots=9,
        context_len=9000,
    )
    state = DraftState(9, GAMMA, "cpu", lambda: make_estimator("beta"))
    costs = RunningCost.stored(cost, "a test")
    return ModeScheduler(SchedulerConfig(), GAMMA, context, costs, state), state


def run(modes, states, steps, decide, seed=3):
    """Draft lengths of each verify, the accepted ones drawn at random but alike for any policy."""
    rng = random.Random(seed)
    lens = [4000 + 500 * i for i in range(len(states))]
    found = []
    for _ in range(steps):
        verify = decide(lens, states)
        for i, state in enumerate(states):
            if not verify[i]:
                state.pending += 1
                state.age += 1
                continue
            drafts = state.pending
            accepted = min(drafts, int(rng.expovariate(0.15)))
            found.append((i, drafts))
            state.begin_settling()
            state.settle(drafts, accepted)
            lens[i] += accepted + 1
    return found


def test_planned_runs_equal_step_by_step_decisions(monkeypatch):
    monkeypatch.setattr(module, "PLAIN_RUN", 0)
    modes, drafts = scheduler(KV_BOUND)
    slots = list(range(1, 7))
    caps = [GAMMA] * 6

    def planned(lens, states):
        return modes.decide(slots, lens, states, caps)[0]

    found = run(modes, [drafts.get(slot, 0) for slot in slots], 150, planned)

    policy = AspirePolicy(gamma_max=GAMMA, first_draft=3)
    modes, drafts = scheduler(KV_BOUND)

    def stepwise(lens, states):
        kv = [modes._context.draft_kv(s + t.pending) for s, t in zip(lens, states, strict=True)]
        rows = [modes._row(*given) for given in zip(slots, lens, states, caps, kv, strict=True)]
        return policy.decide(rows, modes._cost.model)

    assert run(modes, [drafts.get(slot, 0) for slot in slots], 150, stepwise) == found
    assert len({length for _, length in found}) > 4


def test_plain_rows_are_asked_now_and_then_and_still_probe(monkeypatch):
    modes, drafts = scheduler(TOKEN_BOUND)
    asked = []
    original = AspirePolicy.plan

    def counted(policy, rows, *given):
        asked.append(len(rows))
        return original(policy, rows, *given)

    monkeypatch.setattr(AspirePolicy, "plan", counted)
    state = drafts.get(1, 0)
    for _ in range(64):
        (verify,), _ = modes.decide([1], [100], [state], [GAMMA])
        assert verify
        state.begin_settling()
        state.settle(0, 0)
    # Short of every PLAIN_RUN + 1: a run of plain steps ends where a probe may be due.
    assert 64 // (PLAIN_RUN + 1) <= len(asked) <= 64 // (PLAIN_RUN + 1) + 4


def test_a_cap_ends_a_planned_run():
    modes, drafts = scheduler(CostModel(1e-4, 1e-6, 1e-7))
    state = drafts.get(1, 0)
    assert modes.decide([1], [5000], [state], [GAMMA])[0] == [False]
    state.pending = 2
    assert modes.decide([1], [5000], [state], [2])[0] == [True]


def phases(cost: CostModel, rate: float, count: int = 6) -> tuple[ModeScheduler, list, list, list]:
    modes, drafts = scheduler(cost)
    states = [drafts.get(slot, 0) for slot in range(1, count + 1)]
    for state in states:
        state.verifies = 5
        for _ in range(40):
            state.acceptance.observe(10, round(10 * rate))
    return modes, states, list(range(1, count + 1)), [GAMMA] * count


def test_a_batch_that_does_not_draft_decodes_plainly_for_long():
    modes, states, slots, caps = phases(TOKEN_BOUND, 0.3)
    lens = [4000] * len(states)
    # The first phase shows what plain steps of this size take.
    assert modes.plain_steps(slots, lens, states, caps) == module.PLAIN_TRIAL
    shape = module.Running(slots, lens, states, caps).plain_shape()
    modes._cost.plain_speed.observe(6, modes._cost.model.predict(shape), 1e-3)
    for state in states:
        state.plain(module.PLAIN_TRIAL, 0)
    assert modes.plain_steps(slots, lens, states, caps) == module.PLAIN_PHASE


def test_no_phase_while_somebody_holds_drafts_or_starts_some():
    modes, states, slots, caps = phases(LONG_CONTEXTS, 0.95)
    lens = [8000] * len(states)
    assert modes.plain_steps(slots, lens, states, caps) == 0
    assert all(state.run for state in states)
    states[2].pending = 1
    assert modes.plain_steps(slots, lens, states, caps) == 0


def test_measured_plain_steps_decide():
    """Drafts that pay against a plain step as predicted may not pay against one as it is."""
    modes, states, slots, caps = phases(KV_BOUND, 0.75)
    lens = [8000] * len(states)
    predicted = modes._cost.model.predict(module.Running(slots, lens, states, caps).plain_shape())
    modes._cost.plain_speed.observe(6, predicted, predicted)
    assert modes.plain_steps(slots, lens, states, caps) == 0
    for state in states:
        state.run = None
    for _ in range(20):
        modes._cost.plain_speed.observe(6, predicted, 0.3 * predicted)
    assert modes.plain_steps(slots, lens, states, caps) == module.PLAIN_PHASE


def test_probes_become_rarer_but_never_cease():
    modes, states, slots, caps = phases(LONG_CONTEXTS, 0.0)
    lens = [8000] * len(states)
    predicted = modes._cost.model.predict(module.Running(slots, lens, states, caps).plain_shape())
    modes._cost.plain_speed.observe(6, predicted, 0.7 * predicted)
    gaps, since = [], 0
    for _ in range(400):
        for state in states:
            # What the real estimator forgets is another matter.
            state.acceptance.observe(1, 0)
        steps = modes.plain_steps(slots, lens, states, caps)
        if steps:
            modes.plain_ran(steps)
            since += steps
            for state in states:
                state.plain(steps, 0)
            continue
        gaps.append(since)
        since = 0
        assert [state.run for state in states] == [1] * 6
        for state in states:
            state.begin_settling()
            state.settle(0, 0)
    assert gaps[0] < 200
    assert gaps[-1] >= module.RAREST_PROBE * 32
    assert len(gaps) > 8


def test_without_plain_steps_a_batch_is_asked_again_soon():
    modes, states, slots, caps = phases(TOKEN_BOUND, 0.3)
    verify, _ = modes.decide(slots, [4000] * 6, states, caps)
    assert verify == [True] * 6
    assert all(state.rest <= PLAIN_RUN for state in states)


def test_nobody_drafts_while_drafting_rests():
    modes, states, slots, caps = phases(LONG_CONTEXTS, 0.95)
    lens = [8000] * len(states)
    check = modes.clock_check
    check.observe(1, 1.0, 1000, len(states), 1e-3)
    rest = check.rest
    assert rest > 1
    # One holds drafts still: it verifies them, and the others decode plainly beside it.
    states[0].pending, states[0].run = 1, 2
    assert modes.plain_steps(slots, lens, states, caps) == 0
    verify, _ = modes.decide(slots, lens, states, caps)
    assert verify == [False, *[True] * (len(states) - 1)]
    states[0].pending = 2
    for state in states[1:]:
        state.begin_settling()
        state.settle(0, 0)
    verify, _ = modes.decide(slots, lens, states, caps)
    assert all(verify)
    for state in states:
        drafts = state.pending
        state.begin_settling()
        state.settle(drafts, drafts)
    # The two mixed steps count.
    assert modes.plain_steps(slots, lens, states, caps) == rest - 2
    modes.plain_ran(rest - 2)
    for state in states:
        state.plain(rest - 2, 0)
    assert check.rest == 0
    assert modes.plain_steps(slots, lens, states, caps) == 0
    assert all(state.run for state in states)
