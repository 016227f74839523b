"""Who belongs to a phase of plain steps, and how its steps are counted."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest

pytest.importorskip("sglang.srt.runtime_context")

from aspire_sglang.runtime.draft_state import SlotState
from aspire_sglang.runtime.plain_steps import PLAIN_PHASE, Phase, PlainSteps
from aspire_sglang.speculation.acceptance import make_estimator
from aspire_sglang.speculation.cost_model import StepShape


class Request(SimpleNamespace):
    def __init__(self, rid: str) -> None:
        super().__init__(rid=rid, is_retracted=False, over=False)

    def finished(self) -> bool:
        return self.over


class Worker:
    def __init__(self) -> None:
        self.booked: Counter[str] = Counter()
        self.telemetry = SimpleNamespace(step=lambda **given: None)

    def book_plain(self, req, steps):
        self.booked[req.rid] += steps


def state() -> SlotState:
    return SlotState(1, make_estimator("beta"))


def begin(rids: str, steps: int = 100, asking: str = ""):
    worker = Worker()
    owner = PlainSteps(worker, SimpleNamespace(), 17)
    batch = SimpleNamespace(reqs=[Request(rid) for rid in rids])
    members = {req.rid: (req, state()) for req in batch.reqs}
    shape = StepShape(len(rids), 10, 10)
    return Phase(owner, batch, members, steps, shape, frozenset(asking)), worker, batch


def process(phase: Phase, finishes: str = "", seen=None) -> None:
    """SGLang processes a result; it finds some requests finished."""

    def original(batch, result):
        for req in batch.reqs:
            if req.rid in finishes:
                req.over = True
                phase.owner.finished(req.rid)

    result = SimpleNamespace(can_run_cuda_graph=True, **{PLAIN_PHASE: phase})
    phase.owner.process(phase, seen or phase.batch, result, original)


def test_lasts_as_long_as_decided():
    phase, _, batch = begin("abc", steps=2)
    assert phase.goes_on(batch)
    phase.launch()
    phase.launch()
    assert not phase.goes_on(batch)


def test_ends_when_somebody_joins():
    for change in ("abcd", "acd", "d"):
        phase, _, batch = begin("abc")
        known = {req.rid: req for req in batch.reqs}
        batch.reqs = [known.get(rid) or Request(rid) for rid in change]
        assert not phase.goes_on(batch)


def test_goes_on_while_few_leave():
    phase, _, batch = begin("abcdefgh")
    batch.reqs = batch.reqs[:-1]
    assert phase.goes_on(batch)
    batch.reqs = batch.reqs[1:]
    assert phase.goes_on(batch)
    batch.reqs = batch.reqs[2:]
    assert not phase.goes_on(batch)


def test_a_phase_that_requests_ask_for_ends_with_the_last_of_them():
    phase, _, batch = begin("abcdefgh", asking="bg")
    for gone, goes_on in (("b", True), ("c", True), ("g", False)):
        batch.reqs = [req for req in batch.reqs if req.rid != gone]
        assert phase.goes_on(batch) == goes_on


def test_another_batch_is_another_phase():
    phase, _, batch = begin("abc")
    assert not phase.goes_on(SimpleNamespace(reqs=batch.reqs))


def test_counts_of_requests_that_end_at_different_steps():
    """With overlap scheduling: the result of a step comes after the next launch."""
    phase, worker, batch = begin("abcd")
    seen = SimpleNamespace(reqs=batch.reqs[:])
    phase.launch()
    for ends in ("", "b", "", "d"):
        phase.launch()
        process(phase, ends, seen)
        batch.reqs = [req for req in batch.reqs if not req.over]
        assert phase.goes_on(batch) or ends == "d"
    assert worker.booked == {"b": 2, "d": 4}
    states = {rid: own for rid, (_, own) in phase.members.items()}
    phase.close()
    assert worker.booked == {"a": 4, "b": 2, "c": 4, "d": 4}
    # The fifth step is still running.
    assert {own.unsettled for own in states.values()} == {1}
    assert {own.verifies for own in states.values()} == {5}
    process(phase, "c", seen)
    assert worker.booked == {"a": 5, "b": 2, "c": 5, "d": 4}
    assert states["a"].unsettled == 0


def test_a_retracted_request_keeps_what_it_has():
    phase, worker, batch = begin("abcde")
    for _ in range(3):
        phase.launch()
        process(phase)
    gone, batch.reqs = batch.reqs[1], [batch.reqs[0], *batch.reqs[2:]]
    gone.is_retracted = True
    assert phase.goes_on(batch)
    assert worker.booked == {"b": 3}
    phase.launch()
    process(phase)
    phase.close()
    assert worker.booked == {"a": 4, "b": 3, "c": 4, "d": 4, "e": 4}


def test_a_phase_forgets_as_many_steps_as_it_had():
    phase, _, _ = begin("ab")
    own = phase.members["a"][1]
    for _ in range(30):
        own.acceptance.observe(4, 0)
    low = own.acceptance.rate
    for _ in range(50):
        phase.launch()
    phase.processed = 50
    phase.close()
    one_by_one = make_estimator("beta")
    for _ in range(30):
        one_by_one.observe(4, 0)
    for _ in range(50):
        one_by_one.decay()
    assert own.acceptance.rate == pytest.approx(one_by_one.rate)
    assert own.acceptance.rate > low


def test_time_of_a_step_needs_some_steps():
    phase, _, _ = begin("ab")
    phase.launch()
    phase.launch()
    assert phase.seconds() is None
    for _ in range(9):
        phase.launch()
    seconds = phase.seconds()
    assert seconds is not None
    assert 0 <= seconds < 1
    # Grammars and the like take time of their own.
    phase.asking = frozenset("a")
    assert phase.seconds() is None
