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
