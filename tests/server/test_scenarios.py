"""Whatever is asked at once, the invariants hold: nothing leaks, counts agree, budgets are kept,
speculation runs, and greedy texts are plain decoding's."""

from __future__ import annotations

from itertools import count, pairwise

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.server.client import Client
from tests.server.conftest import Aspire
from tests.server.scenarios import SCENARIOS, Outcome, Scenario, play
from tests.server.scoring import assert_greedy

QUIET = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]
NAMES = count()

# The same short list of scenarios each time; searching is the long profile's task.
SHORT_PROFILE = settings(
    max_examples=8, derandomize=True, deadline=None, suppress_health_check=QUIET, database=None,
    phases=[Phase.generate],
)  # fmt: skip
LONG_PROFILE = settings(
    max_examples=120, deadline=None, suppress_health_check=QUIET, print_blob=True, database=None
)


def check_answer(outcome: Outcome) -> None:
    """I2 and I3: counts agree and the budget holds, in the answer and along its stream."""
    answer, ask = outcome.answer, outcome.ask
    assert answer is not None
    meta = answer["meta_info"]
    tokens, kind = meta["completion_tokens"], meta["finish_reason"]["type"]
    assert len(answer["output_ids"]) == tokens <= ask.new
    assert (tokens == ask.new) or kind != "length"
    assert kind in ("length", "stop") or ask.fate == "abort"
    if ask.options.get("return_logprob"):
        assert [entry[1] for entry in meta["output_token_logprobs"]] == answer["output_ids"]
        assert len(meta["output_top_logprobs"]) == tokens
    if ask.options.get("return_hidden_states") and kind != "abort":
        assert len(meta["hidden_states"]) == tokens
    counted = [event["meta_info"]["completion_tokens"] for event in outcome.streamed]
    assert all(before < after for before, after in pairwise(counted))
    for event in outcome.streamed:
        length = event["meta_info"]["completion_tokens"]
        assert event["output_ids"] == answer["output_ids"][:length]
    if "aspire" not in meta:
        assert (kind, tokens) == ("abort", 0), "only what never ran has nothing to tell"
        return
    switch = ask.options.get("custom_params", {}).get("aspire", True)
    drafted = meta["aspire"]["speculated"]
    assert not (drafted and switch is False)
    if switch is False:
        assert meta["aspire"]["speculation"] == "off by request"
    if switch is True and tokens >= 12 and not ask.options.get("regex"):
        assert drafted, "I4: speculation did not run"


def check(plain: Client, aspire: Aspire, scenario: Scenario) -> None:
    aspire.configure(*scenario.settings())
    outcomes = play(aspire, scenario, f"scenario-{next(NAMES)}")
    aspire.wait_idle()
    answered = [outcome for outcome in outcomes if outcome.answer is not None]
    for outcome in answered:
        check_answer(outcome)
    greedy = [outcome for outcome in answered if outcome.ask.greedy]
    # I5, for the longest texts; scoring costs as much as making them.
    for outcome in sorted(greedy, key=lambda o: -len(o.answer["output_ids"]))[:2]:
        assert_greedy(plain, outcome.ids, outcome.answer["output_ids"])
    # I1: flushes, reads the log, asks for health.
    aspire.assert_invariants()


def test_random_scenarios(plain, aspire):
    @SHORT_PROFILE
    @given(SCENARIOS)
    def run(scenario):
        check(plain, aspire, scenario)

    run()


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_many_random_scenarios(plain, aspire):
    @LONG_PROFILE
    @given(SCENARIOS)
    def run(scenario):
        check(plain, aspire, scenario)

    run()
