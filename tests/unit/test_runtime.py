"""The runtime's own bookkeeping, without a server."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from aspire_sglang.config import AspireConfig
from aspire_sglang.runtime.batching import build_plan
from aspire_sglang.runtime.cost import RunningCost
from aspire_sglang.runtime.draft_state import DraftState
from aspire_sglang.runtime.introspection import draft_summary
from aspire_sglang.runtime.requests import unsupported_parameters
from aspire_sglang.runtime.telemetry import Telemetry
from aspire_sglang.speculation.acceptance import make_estimator
from aspire_sglang.speculation.cost_model import StepShape


def plan(pending: list[int], verify: list[bool]):
    """Requests in slots 1, 2, ...; position p of slot s lies in KV slot 1000 * s + p."""
    n = len(pending)
    table = torch.arange(5).view(5, 1) * 1000 + torch.arange(200).view(1, 200)
    drafts = torch.arange(5).view(5, 1) * 100 + torch.arange(1, 9).view(1, 8)
    return build_plan(
        slots=list(range(1, n + 1)),
        seq_lens=[10 * (i + 1) for i in range(n)],
        pending=pending,
        verify=verify,
        bonus=torch.tensor([7000 + i for i in range(n)]),
        draft_tokens=drafts,
        req_to_token=table.int(),
    )


def test_mixed_plan_lays_out_rows():
    found = plan([0, 2, 3, 0], [False, True, False, True])
    assert found.q_lens == [1, 3, 1, 1]
    assert found.num_tokens == 6
    # Draft rows first: their newest token each; then verify rows: the bonus and all drafts.
    assert found.input_ids.tolist() == [7000, 303, 7001, 201, 202, 7003]
    assert found.positions.tolist() == [10, 33, 20, 21, 22, 40]
    assert found.out_cache_loc.tolist() == [1010, 3033, 2020, 2021, 2022, 4040]
    assert (found.draft_rows, found.verify_rows) == ([0, 2], [1, 3])
    assert found.mixed


def test_plan_shape_counts_what_rows_read():
    shape = plan([0, 2], [False, True]).shape([5, 99])
    assert (shape.tokens, shape.kv_tokens, shape.score_pairs) == (4, 5 + 23, 5 + 3 * 23)


@pytest.mark.parametrize("verify", [[True, True], [False, False]])
def test_uniform_steps_are_not_mixed(verify):
    assert not plan([1, 1], verify).mixed


def test_slot_state_follows_the_generation_of_the_slot():
    state = DraftState(4, 3, "cpu", lambda: make_estimator("beta"))
    first = state.get(2, generation=1)
    state.add_draft(2, first, 17)
    assert state.get(2, generation=1).pending == 1
    assert state.get(2, generation=2).pending == 0, "a new owner must not see old drafts"


def test_settling_feeds_the_estimate_and_forgets_the_run():
    state = DraftState(4, 3, "cpu", lambda: make_estimator("beta", prior_rate=0.5))
    slot = state.get(1, generation=1)
    before = slot.acceptance.rate
    for token in (5, 6, 7):
        state.add_draft(1, slot, token)
    assert state.tokens[1].tolist() == [5, 6, 7]
    state.settle(slot, accepted=3)
    assert slot.acceptance.rate > before
    assert (slot.pending, slot.verifies, slot.age, slot.probs) == (0, 1, 0, [])


def test_counters_are_reported_before_anything_was_counted():
    found = Telemetry(AspireConfig()).snapshot()
    assert found["accepted_drafts"] == found["discarded_drafts"] == found["graph_steps"] == 0
    assert found["mixed_step_fraction"] == 0.0


def test_telemetry_totals_and_requests():
    telemetry = Telemetry(AspireConfig(requests_kept=2))
    telemetry.step(drafts=2, verifies=1, tokens=5, seconds=0.5)
    telemetry.step(drafts=0, verifies=3, tokens=3, seconds=0.25)
    for rid in ("a", "b", "c"):
        telemetry.started(rid)
        telemetry.verified(rid, drafts=4, accepted=3)
    telemetry.verified("c", drafts=0, accepted=0)
    found = telemetry.snapshot()
    assert found["mixed_step_fraction"] == 0.5
    assert (found["accepted_drafts"], found["discarded_drafts"]) == (9, 3)
    assert list(found["requests"]) == ["b", "c"], "only the last ones are kept"
    request = found["requests"]["c"]
    assert request["draft_lengths"] == {"0": 1, "4": 1}
    assert request["accept_length"] == pytest.approx((3 + 2) / 2)
    telemetry.started("c")
    assert telemetry.snapshot()["requests"]["c"]["verify_steps"] == 0


def test_draft_summary_of_a_histogram():
    assert draft_summary([2, 0, 3]) == {
        "draft_steps": 6,
        "verify_steps": 5,
        "draft_lengths": {"0": 2, "2": 3},
    }
    assert draft_summary([])["draft_steps"] == 0


def request(**options):
    return SimpleNamespace(sampling_params=options, return_logprob=False, lora_path=None)


def test_supported_requests_pass():
    sampling = request(temperature=0.7, top_p=0.9, top_k=5, min_p=0.1)
    neutral = {"frequency_penalty": 0.0, "repetition_penalty": 1.0, "regex": None, "logit_bias": {}}
    for on_cpu in (True, False):
        assert unsupported_parameters(sampling, on_cpu) == []
        assert unsupported_parameters(request(**neutral), on_cpu) == []


def test_unsupported_parameters_are_all_named():
    body = request(sampling_seed=1)
    body.return_entropy, body.lora_path = True, "adapter"
    assert unsupported_parameters(body, on_cpu=False) == [
        "sampling_seed",
        "return_entropy",
        "lora_path",
    ]
    assert unsupported_parameters(body, on_cpu=True) == ["return_entropy", "lora_path"]


def test_all_else_is_honoured_on_both_platforms():
    body = request(frequency_penalty=1.0, min_new_tokens=4, logit_bias={"3": 1.0}, regex="a+")
    body.custom_logit_processor = "{}"
    body.return_logprob = True
    body.return_hidden_states = True
    for on_cpu in (True, False):
        assert unsupported_parameters(body, on_cpu) == []


def test_parameters_that_the_server_prefers_are_looked_at():
    preferred = {"sampling_seed": 1}
    assert unsupported_parameters(request(), False, preferred) == ["sampling_seed"]
    assert unsupported_parameters(request(sampling_seed=None), False, preferred) == []


def test_a_seed_means_nothing_to_a_greedy_request():
    assert unsupported_parameters(request(sampling_seed=1, temperature=0), False) == []


def test_one_token_comes_from_the_prefill_and_may_use_what_sglang_honours_there():
    for tokens, refused in ((1, ["sampling_seed"]), (2, ["sampling_seed", "return_entropy"])):
        body = request(max_new_tokens=tokens, sampling_seed=1)
        body.return_entropy = True
        assert unsupported_parameters(body, False) == refused


def test_unsupported_sglang_is_refused(monkeypatch):
    from aspire_sglang import compat, plugin

    monkeypatch.setattr(compat, "sglang_version", lambda: "0.4.0")
    with pytest.raises(SystemExit) as ended:
        plugin.load()
    assert ended.value.code == 2


def test_every_hook_has_a_reason_and_the_table_is_complete():
    from aspire_sglang.runtime.hooks import HOOKS

    targets = [hook.target for hook in HOOKS]
    assert len(targets) == len(set(targets))
    assert all(len(hook.reason) > 30 for hook in HOOKS)


def test_a_disturbed_profile_is_measured_again_and_then_given_up():
    shapes = [StepShape(t, kv, t * kv) for t, kv in ((1, 100), (1, 5000), (8, 900), (4, 40_000))]
    quiet = [(shape, 0.01 + 1e-3 * shape.tokens + 1e-6 * shape.kv_tokens) for shape in shapes]
    disturbed = [(shape, 10.0 ** (i % 2 * 3 - 2)) for i, shape in enumerate(shapes * 2)]
    answers = iter([disturbed, quiet])
    recovered = RunningCost.profiled(lambda: next(answers))
    assert recovered.report()["profile_median_error"] < 0.01
    given_up = RunningCost.profiled(lambda: disturbed)
    assert "profile_median_error" not in given_up.report()
    # Without a trusted profile, measured steps move the model freely.
    for _ in range(200):
        for shape, seconds in quiet:
            given_up.observe(shape, seconds)
    for shape, seconds in quiet:
        assert given_up.model.predict(shape) == pytest.approx(seconds, rel=0.25)
