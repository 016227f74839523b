"""Requests that a GPU decodes plainly: who they are, and what their batch then does."""

from __future__ import annotations

import inspect
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang.srt.managers.io_struct")

from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.sampling_params import SamplingParams

from aspire_sglang.runtime.draft_state import SlotState
from aspire_sglang.runtime.introspection import speculation_of
from aspire_sglang.runtime.modes import PLAIN_PHASE, Running
from aspire_sglang.runtime.plain_requests import (
    FIELDS,
    SAMPLING,
    needs_plain_steps,
    plain_parameters,
)
from aspire_sglang.runtime.plain_worker import PlainPhases
from aspire_sglang.runtime.ranks import Ranks
from aspire_sglang.speculation.acceptance import make_estimator

USED: dict[str, Any] = {
    "frequency_penalty": 0.5,
    "presence_penalty": -0.5,
    "repetition_penalty": 1.1,
    "min_new_tokens": 1,
    "logit_bias": {"3": 1.0},
    "json_schema": "{}",
    "regex": "a+",
    "ebnf": 'root ::= "a"',
    "structural_tag": "{}",
    "custom_logit_processor": "{}",
    "return_logprob": True,
    "return_hidden_states": "last",
}


def body(**given: Any) -> GenerateReqInput:
    fields = {name: given.pop(name) for name in FIELDS if name in given}
    return GenerateReqInput(input_ids=[1], sampling_params=given, **fields)


def running(rid: str = "a", **given: Any) -> Any:
    """SGLang's ``Req`` as far as it matters here."""
    fields = {name: given.pop(name, None) for name in FIELDS}
    return SimpleNamespace(rid=rid, sampling_params=SamplingParams(**given), **fields)


@pytest.mark.parametrize("name", USED)
def test_each_parameter_is_told_on_both_sides(name):
    given = body(**{name: USED[name]})
    assert plain_parameters(given.sampling_params.get, given) == [name]
    assert needs_plain_steps(running(**{name: USED[name]}))


def test_every_parameter_has_a_case():
    assert list(USED) == [*SAMPLING, *FIELDS]


def test_sglang_knows_the_parameters_by_these_names():
    """A name that is gone would be a parameter that is ignored in silence."""
    assert set(SAMPLING) <= set(SamplingParams.__struct_fields__)
    assert set(FIELDS) <= set(inspect.signature(Req).parameters)
    assert set(FIELDS) <= set(inspect.signature(GenerateReqInput).parameters)
    defaults = SamplingParams()
    assert all(getattr(defaults, name) == neutral for name, neutral in SAMPLING.items())


def test_what_speculation_honours_needs_no_plain_steps():
    given = {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "stop": ["x"],
        "stop_token_ids": [3],
        "custom_params": {"aspire": {"gamma_max": 2}},
        "repetition_penalty": 1,
        "frequency_penalty": 0,
        "logit_bias": {},
        "regex": "",
    }
    assert plain_parameters(given.get, body(**given)) == []
    assert not needs_plain_steps(running(**given))
    assert not needs_plain_steps(running())


@pytest.mark.parametrize("on_cpu", [True, False])
def test_the_answer_says_why(on_cpu):
    def told(**given: Any) -> tuple[str, str | None]:
        asked = body(**given)
        return speculation_of(asked.sampling_params, asked, on_cpu)

    assert told(temperature=0.5) == ("on", None)
    off = {"custom_params": {"aspire": False}}
    assert told(**off)[0] == told(regex="a+", **off)[0] == "off by request"
    speculation, reason = told(regex="a+", return_logprob=True)
    if on_cpu:
        assert (speculation, reason) == ("on", None)
    else:
        assert speculation == "off by parameter"
        assert reason is not None
        assert "regex, return_logprob" in reason


class Worker(PlainPhases):
    """Decides for a batch; the online scheduler would let it draft."""

    plain_for_parameters = True

    def __init__(self) -> None:
        self.ranks = Ranks()
        self.modes: Any = SimpleNamespace(plain_steps=lambda *_: 0)
        self.dropped: Counter[str] = Counter()
        self.telemetry: Any = SimpleNamespace(dropped=self._drop)
        self.states: dict[str, SlotState] = {}

    def _drop(self, drafts: int) -> None:
        self.dropped["drafts"] += drafts

    def running(self, batch: Any) -> Running:
        for req in batch.reqs:
            fresh = SlotState(1, make_estimator("beta"), pending=2, run=4, age=2)
            self.states.setdefault(req.rid, fresh)
        count = len(batch.reqs)
        return Running([1] * count, [9] * count, [self.states[r.rid] for r in batch.reqs], [4])


def test_one_such_request_makes_its_batch_decode_plainly():
    worker = Worker()
    batch = SimpleNamespace(reqs=[running("a"), running("b")])
    plan = worker.plan_plain(batch)
    assert (plan.steps, plan.asking, worker.dropped["drafts"]) == (0, frozenset(), 0)
    batch.reqs.append(running("c", regex="a+"))
    plan = worker.plan_plain(batch)
    assert (plan.steps, plan.asking) == (PLAIN_PHASE, {"c"})
    assert worker.dropped["drafts"] == 6
    assert {(s.pending, s.run, s.age) for s in worker.states.values()} == {(0, None, 0)}
    del batch.reqs[2]
    plan = worker.plan_plain(batch)
    assert (plan.steps, plan.asking) == (0, frozenset())


def test_a_worker_that_honours_everything_drops_nothing():
    worker = Worker()
    worker.plain_for_parameters = False
    plan = worker.plan_plain(SimpleNamespace(reqs=[running("a", regex="a+")]))
    assert (plan.steps, plan.asking, worker.dropped["drafts"]) == (0, frozenset(), 0)


@pytest.mark.parametrize("delayed", [True, False])
def test_ranks_agree_on_samples_also_where_sglang_samples_later(delayed):
    """With grammars and overlap scheduling SGLang samples after the forward has returned."""
    told: list[Any] = []

    class First(Ranks):
        def first(self, values: Any) -> Any:
            told.append(values)
            return "agreed"

    result = SimpleNamespace(next_token_ids=None, delay_sample_func=None)

    def sample() -> Any:
        result.next_token_ids = "drawn"
        return result

    class Target:
        enable_spec = True

        def forward_batch_generation(self, batch: Any) -> Any:
            # Or SGLang would not wait with the sampling.
            assert not self.enable_spec
            if delayed:
                result.delay_sample_func = sample
                return result
            return sample()

    worker = Worker()
    worker.ranks, worker.rank_check, worker.target_worker = First(), None, Target()
    batch = SimpleNamespace(sampling_info=SimpleNamespace(is_all_greedy=False))
    found: Any = worker._plain_forward(batch)
    assert worker.target_worker.enable_spec
    if delayed:
        assert told == []
        assert found.delay_sample_func() is found
    assert told == ["drawn"]
    assert found.next_token_ids == "agreed"
