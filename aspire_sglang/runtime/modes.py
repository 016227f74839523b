"""The online scheduler's hook into batch forming: who drafts and who verifies this step."""

from __future__ import annotations

from aspire_sglang.config import SchedulerConfig
from aspire_sglang.context.sparse import SparseContext
from aspire_sglang.runtime.cost import RunningCost
from aspire_sglang.runtime.draft_state import DraftState, SlotState
from aspire_sglang.speculation.policies import Policy, RowState, make_policy

PLAIN_RUN = 7
"""Verifies for which a decision against drafts holds: a plain step is too short to ask at each."""


def policy_of(config: SchedulerConfig, gamma_max: int) -> Policy:
    """The policy named in the configuration, with its options."""
    match config.policy:
        case "aspire" | "shadow_price" as name:
            return make_policy(
                name,
                gamma_max=gamma_max,
                first_draft=config.first_draft,
                probe_interval=config.probe_interval,
            )
        case "feedback":
            return make_policy("feedback", gamma_max=gamma_max)
        case "constant_cost":
            return make_policy(
                "constant_cost",
                gamma_max=gamma_max,
                cost_ratio=config.cost_ratio,
                first_draft=config.first_draft,
            )
        case "global":
            return make_policy("global", gamma_max=gamma_max, first_draft=config.first_draft)
        case "fixed" | "staggered" as name:
            return make_policy(name, gamma=min(config.gamma or gamma_max, gamma_max))
        case name:
            return make_policy(name)


class ModeScheduler:
    """Asks the policy, with what the runtime knows about every running request."""

    def __init__(
        self,
        config: SchedulerConfig,
        gamma_max: int,
        context: SparseContext,
        cost: RunningCost,
        drafts: DraftState,
    ) -> None:
        self._policy = policy_of(config, gamma_max)
        self._context = context
        self._cost = cost
        self._drafts = drafts

    def decide(
        self, slots: list[int], seq_lens: list[int], states: list[SlotState], caps: list[int]
    ) -> tuple[list[bool], list[int]]:
        """Modes of one step.

        Args:
            slots: request-pool row per request.
            seq_lens: committed tokens per request (S).
            states: speculation state per request.
            caps: most drafts each request may hold now.

        Returns:
            (verify or draft per request, KV tokens that a draft row of it reads).
        """
        draft_kv = self._context.draft_kv_many(
            [s + state.pending for s, state in zip(seq_lens, states, strict=True)]
        )
        policy = self._policy
        if policy.plans and not any(state.confidence for state in states):
            self._plan(slots, seq_lens, states, caps, draft_kv)
            verify = [
                state.pending >= min(state.run or 0, cap)
                for state, cap in zip(states, caps, strict=True)
            ]
            return verify, draft_kv
        rows = [
            self._row(slot, s, state, cap, kv)
            for slot, s, state, cap, kv in zip(slots, seq_lens, states, caps, draft_kv, strict=True)
        ]
        return policy.decide(rows, self._cost.model), draft_kv

    def _plan(
        self,
        slots: list[int],
        seq_lens: list[int],
        states: list[SlotState],
        caps: list[int],
        draft_kv: list[int],
    ) -> None:
        """Decide on the runs that start now; the others were decided on when they started."""
        starting = []
        for i, state in enumerate(states):
            if state.run is not None:
                continue
            if state.rest > 0:
                state.rest -= 1
                state.run = 0
            else:
                starting.append(i)
        if not starting:
            return
        rows = [self._row(slots[i], seq_lens[i], states[i], caps[i], draft_kv[i]) for i in starting]
        together = sum(state.verifies == 0 for state in states) > 1
        runs = self._policy.plan(rows, self._cost.model, len(states), together)
        for i, run in zip(starting, runs, strict=True):
            state = states[i]
            state.run = run
            if run == 0:
                # Up to the next probe at most.
                state.rest = min(PLAIN_RUN, self._policy.until_probe(state.verifies))

    def _row(self, slot: int, seq_len: int, state: SlotState, cap: int, kv: int) -> RowState:
        return RowState(
            committed=seq_len,
            pending=state.pending,
            draft_kv=kv,
            rate=state.acceptance.rate,
            max_draft=cap,
            verifies=state.verifies,
            age=state.age,
            slot=slot,
            survival=self._drafts.survival(state),
            length=state.length,
        )
