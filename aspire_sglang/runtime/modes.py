"""The online scheduler's hook into batch forming: who drafts and who verifies this step."""

from __future__ import annotations

from typing import NamedTuple

from aspire_sglang.config import SchedulerConfig
from aspire_sglang.context.sparse import SparseContext
from aspire_sglang.runtime.cost import RunningCost
from aspire_sglang.runtime.draft_state import DraftState, SlotState
from aspire_sglang.speculation.clock_check import ClockCheck
from aspire_sglang.speculation.cost_model import StepShape
from aspire_sglang.speculation.plain_speed import UNKNOWN_RATIO
from aspire_sglang.speculation.policies import Policy, RowState, make_policy
from aspire_sglang.speculation.rows import PLAIN_PHASE, PLAIN_RUN

PLAIN_TRIAL = 12
"""Steps of a phase that is to show what plain steps take."""

RAREST_PROBE = 16
"""Where a whole batch decodes plainly, probes that change nothing become rarer, up to this many
times: they interrupt everybody."""


class Running(NamedTuple):
    """The running requests, in batch order.

    Attributes:
        slots: request-pool row per request.
        seq_lens: committed tokens per request (S).
        states: speculation state per request.
        caps: most drafts each request may hold now.
    """

    slots: list[int]
    seq_lens: list[int]
    states: list[SlotState]
    caps: list[int]

    def plain_shape(self) -> StepShape:
        """What a step costs in which nobody drafts."""
        read = sum(self.seq_lens) + len(self.seq_lens)
        return StepShape(len(self.seq_lens), read, read)


class PlainPlan(NamedTuple):
    """What is decided on for a batch.

    Attributes:
        steps: plain steps from now on, 0 if it speculates.
        running: its requests.
        asking: ids of the requests that need plain steps; empty if the online scheduler decided.
    """

    steps: int
    running: Running
    asking: frozenset[str] = frozenset()


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
    """Asks the policy, with what the runtime knows about every running request.

    Attributes:
        clock_check: told by the worker how drafting does by the clock; None where it has no say.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        gamma_max: int,
        context: SparseContext,
        cost: RunningCost,
        drafts: DraftState,
    ) -> None:
        self._policy = policy_of(config, gamma_max)
        self._since_probe, self._probe_gap = 0, config.probe_interval
        self._first_gap = config.probe_interval
        self.clock_check = ClockCheck() if config.clock_check and self._policy.plans else None
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
        return self._decide(slots, seq_lens, states, caps, phases=False)

    def _decide(
        self,
        slots: list[int],
        seq_lens: list[int],
        states: list[SlotState],
        caps: list[int],
        phases: bool,
    ) -> tuple[list[bool], list[int]]:
        """:meth:`decide`; ``phases``: a batch in which nobody drafts takes plain steps."""
        draft_kv = self._context.draft_kv_many(
            [s + state.pending for s, state in zip(seq_lens, states, strict=True)]
        )
        policy = self._policy
        if policy.plans and not any(state.confidence for state in states):
            self._plan(slots, seq_lens, states, caps, draft_kv, phases)
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

    def plain_steps(
        self, slots: list[int], seq_lens: list[int], states: list[SlotState], caps: list[int]
    ) -> int:
        """For how many steps the whole batch decodes plainly, 0 if somebody drafts or holds drafts.

        Arguments as :meth:`decide`.
        """
        if any(state.pending for state in states):
            return 0
        for state in states:
            # Nobody is in the middle of a run: the batch is decided on as a whole.
            state.rest = 0
        verify, _ = self._decide(slots, seq_lens, states, caps, phases=True)
        if not all(verify):
            return 0
        if self._policy.plans:
            return 1 + min(state.rest for state in states)
        return self._policy.plain_steps

    def plain_ran(self, steps: int) -> None:
        """The whole batch decoded plainly for so many steps."""
        self._since_probe += steps
        if self.clock_check is not None:
            self.clock_check.plain_ran(steps)

    def _plan(
        self,
        slots: list[int],
        seq_lens: list[int],
        states: list[SlotState],
        caps: list[int],
        draft_kv: list[int],
        phases: bool,
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
        if self.clock_check is not None and self.clock_check.rest:
            # Who holds drafts verifies them; then the whole batch decodes plainly.
            whole = phases and len(starting) == len(states)
            for i in starting:
                states[i].run, states[i].rest = 0, self.clock_check.rest - 1 if whole else 0
            if not phases:
                # These steps count too: no graph of plain steps may hold the batch.
                self.clock_check.plain_ran(1)
            return
        rows = [self._row(slots[i], seq_lens[i], states[i], caps[i], draft_kv[i]) for i in starting]
        together = sum(state.verifies == 0 for state in states) > 1
        if phases and len(starting) == len(states):
            runs = self._plan_all(rows, states, together)
            if not any(runs):
                return
        else:
            runs = self._policy.plan(rows, self._cost.model, len(states), together)
        for i, run in zip(starting, runs, strict=True):
            state = states[i]
            state.run = run
            if run == 0:
                # Up to the next probe at most.
                state.rest = min(PLAIN_RUN, self._policy.until_probe(state.verifies))

    def _plan_all(self, rows: list[RowState], states: list[SlotState], together: bool) -> list[int]:
        """Runs of a batch of which everybody starts one; all 0 also where plain steps of this size
        have to be measured first, as they may be faster than any drafting."""
        cost, count = self._cost, len(rows)
        read = sum(row.committed + 1 for row in rows)
        ratio = cost.plain_speed.ratio(count, cost.model.predict(StepShape(count, read, read)))

        def plan(ratio: float, probe: bool = False) -> list[int]:
            return self._policy.plan(rows, cost.model, count, together, ratio, probe)

        runs = plan(UNKNOWN_RATIO if ratio is None else ratio)
        phase = PLAIN_PHASE
        if ratio is None:
            if any(runs):
                runs = plan(1.0)
            else:
                phase = PLAIN_TRIAL
        if any(runs):
            self._since_probe, self._probe_gap = 0, self._first_gap
            return runs
        if self._since_probe >= self._probe_gap:
            self._since_probe = 0
            self._probe_gap = min(2 * self._probe_gap, RAREST_PROBE * self._first_gap)
            runs = plan(ratio or 1.0, probe=True)
        if not any(runs):
            for state in states:
                state.run, state.rest = 0, phase - 1
        return runs

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
