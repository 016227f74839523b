"""Calibration: what is tried, kept and written."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from aspire_sglang.cli.calibrate import Calibration, Plan, fastest_of, written_config
from aspire_sglang.cli.figures import plot_trials
from aspire_sglang.cli.prompts import _cut_files
from aspire_sglang.cli.trials import (
    Candidate,
    Journal,
    Trial,
    promised_throughput,
    selections,
    stages,
)
from aspire_sglang.config import AspireConfig
from aspire_sglang.speculation.cost_model import CostModel
from aspire_sglang.speculation.policies import AspirePolicy, RowState

COST = CostModel(28e-3, 0.7e-3, 2e-6, 0.13e-6)
PLAN = Plan("some/model", ("--dtype", "float32"), ((1, 2, 3), (4, 5, 6, 7, 8)), 30, 16, 96, 8)


def trial(stage: str, candidate: Candidate, length: float) -> Trial:
    return Trial(stage, candidate, length, 0.9, 10)


def test_every_candidate_is_a_valid_context() -> None:
    best = Candidate(14)
    for layers in (1, 2, 6, 30, 80):
        for _, candidates in stages(layers, 100_000):
            for candidate in candidates(Candidate(min(14, layers - 1))):
                assert 0 <= candidate.refresh_layer < layers
                context = AspireConfig.model_validate({"context": candidate.settings()}).context
                budget = context.min_pages * context.page_size
                assert budget == candidate.tokens
                assert context.sink_pages + context.last_pages <= context.min_pages
    assert best.settings()["refresh_layer"] == 14


def test_stages_cover_the_model_and_stay_near_the_best() -> None:
    (_, coarse), (_, fine), *_ = stages(30, 6000)
    layers = [candidate.refresh_layer for candidate in coarse(Candidate(14))]
    assert len(layers) == len(set(layers)) == 7
    assert min(layers) < 6 < 24 < max(layers)
    assert [candidate.refresh_layer for candidate in fine(Candidate(15))] == [14, 15, 16]
    budgets = [candidate.tokens for candidate in list(stages(30, 1000))[-1][1](Candidate(14))]
    assert max(budgets) < 1000


def test_a_journal_goes_on_where_it_stopped(tmp_path: Path) -> None:
    path = tmp_path / "work" / "trials.jsonl"
    done = trial("budget", Candidate(14, tokens=256), 8.5)
    first = Journal(path, PLAN.key())
    assert first.get(done.candidate) is None
    first.add(done)
    again = Journal(path, PLAN.key())
    assert again.get(done.candidate) == done
    assert again.get(Candidate(15)) is None
    with pytest.raises(ValueError, match="another calibration"):
        Journal(path, {**PLAN.key(), "gamma": 4})


def test_the_promise_is_the_paper_rule_at_its_best_length() -> None:
    row = RowState(6000, 0, 512, 0.93, 16, verifies=5)
    (best,) = AspirePolicy().best_lengths([row] * 8, COST)[:1]
    assert best > 0
    promise = promised_throughput(COST, 0.93, 512, 6000, 8, 16)
    only = [promised_throughput(COST, 0.93, 512, 6000, 8, gamma) for gamma in range(17)]
    assert promise == max(only)
    assert only[best] == pytest.approx(promise)
    assert only[best - 1] < promise


def test_the_written_file_is_a_configuration_with_its_origin(tmp_path: Path) -> None:
    best = trial("budget", Candidate(12, "mean", 8, 256), 9.25)
    timed = [
        replace(trial("timed", candidate, 4.0), tokens_per_s=70.0 + 5 * place)
        for place, candidate in enumerate(selections(best.candidate, shared_only=True))
    ]
    found = Calibration(best, [best, *timed], COST, fastest_of(timed))
    text = written_config(PLAN, found, {"machine": "two cores"})
    settings = AspireConfig.model_validate(yaml.safe_load(text))
    assert settings.context.selection == "last_verify"
    assert settings.context.refresh_layer == 12
    assert settings.context.reduction == "mean"
    assert settings.context.page_size * settings.context.min_pages == 256
    for fact in ("some/model", "two cores", "accept length 9.25", "refresh 70.0, window 75.0"):
        assert fact in text


def test_a_way_to_choose_pages_has_to_be_faster_beyond_noise() -> None:
    def timed(name: str, rate: float) -> Trial:
        return Trial("timed", Candidate(3, selection=name), 4.0, 0.9, 10, rate)

    refresh = timed("refresh", 100.0)
    assert fastest_of([refresh, timed("window", 102.9), timed("hybrid", 60.0)]) == refresh
    window = timed("window", 103.1)
    assert fastest_of([refresh, window, timed("hybrid", 103.05)]) == window


def test_every_way_to_choose_pages_is_a_valid_context() -> None:
    for shared_only, count in ((True, 3), (False, 5)):
        candidates = selections(Candidate(14), shared_only)
        assert candidates[0] == Candidate(14)
        assert len({candidate.selection for candidate in candidates}) == count
        for candidate in candidates:
            AspireConfig.model_validate({"context": candidate.settings()})
    assert not PLAN.shared_only
    assert replace(PLAN, server_args=("--tp-size=2",)).shared_only


def test_a_timed_trial_does_not_hide_the_other_one(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "trials.jsonl", PLAN.key())
    plain = trial("budget", Candidate(14), 8.5)
    timed = replace(plain, tokens_per_s=70.0)
    journal.add(plain)
    assert journal.get(Candidate(14), timed=True) is None
    journal.add(timed)
    again = Journal(tmp_path / "trials.jsonl", PLAN.key())
    assert again.get(Candidate(14)) == plain
    assert again.get(Candidate(14), timed=True) == timed


def test_the_plot_is_a_picture(tmp_path: Path) -> None:
    trials = [trial("refresh layer", Candidate(n), 5 + n / 10) for n in (4, 8, 12)]
    trials += [trial("budget", Candidate(12, tokens=n), 6.0) for n in (256, 512)]
    rate = lambda t: 100 * t.accept_length  # noqa: E731
    plot_trials(trials, trials[2], rate, tmp_path / "found.png", "a model")
    assert (tmp_path / "found.png").read_bytes()[:4] == b"\x89PNG"


class _Words:
    def encode(self, text: str, **_: object) -> list[int]:
        return [len(word) for word in text.split()]


def test_prompts_come_from_the_given_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one three five " * 10)
    prompts = _cut_files(_Words(), [tmp_path / "a.txt"], 12, 5)
    assert [len(prompt) for prompt in prompts] == [12, 12]
    assert prompts[0][:3] == (3, 5, 4)
    assert len(_cut_files(_Words(), [tmp_path / "a.txt"], 12, 1)) == 1
    with pytest.raises(ValueError, match="no text holds 31"):
        _cut_files(_Words(), [tmp_path / "a.txt"], 31, 1)
    with pytest.raises(ValueError, match=r"cannot read .*b\.txt"):
        _cut_files(_Words(), [tmp_path / "b.txt"], 3, 1)


def test_the_key_tells_calibrations_apart() -> None:
    other = Plan("some/model", PLAN.server_args, ((1, 2, 3),), 30, 16, 96, 8)
    assert json.dumps(other.key()) != json.dumps(PLAN.key())
