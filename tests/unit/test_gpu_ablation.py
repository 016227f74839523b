"""The ablation on a GPU: its settings are valid, and what is quoted is what was measured."""

from __future__ import annotations

import argparse
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from aspire_sglang.config import parse_config
from bench import gpu_ablation
from bench.cost_errors import errors_by_bucket, percentile
from bench.gpu_ablation import ADAPTIVE, PRIOR, rows, summary
from bench.gpu_texts import mixed_lengths, shared_tokens, sums
from bench.gpu_variants import CONTEXTS, VARIANTS

ENGINES = ["context_window_16", "context_per_layer_16", "context_refresh_16", "context_hybrid_3_8"]


@pytest.mark.parametrize("greedy", [True, False])
def test_every_line_is_a_configuration_of_its_engine(greedy):
    import yaml

    lines = rows([*CONTEXTS, "stock"], [3, 8], greedy)
    assert len({row.name for row in lines}) == len(lines)
    for row in lines:
        assert row.engine in VARIANTS
        for text in row.settings:
            given = parse_config(yaml.safe_load(text), "test")
            started = parse_config(yaml.safe_load(VARIANTS[row.engine][1]), "test")
            assert row.engine == "stock" or given.context == started.context


def test_rules_can_be_left_out():
    names = {row.name for row in rows(ENGINES, [3], True, ["the paper's rule"])}
    assert "refresh, the paper's rule" in names
    assert not any("shadow" in name for name in names)


def test_prior_work_and_plain_decoding_are_among_the_lines():
    names = {row.name for row in rows(ENGINES, [3], True)}
    assert {*PRIOR, "refresh, plain decoding", "refresh, in step", "refresh, feedback"} <= names


def test_confidence_is_asked_for_greedy_drafts_only():
    greedy = {row.name for row in rows(ENGINES, [3], True)}
    sampled = {row.name for row in rows(ENGINES, [3], False)}
    assert {f"refresh, {what}" for what in ADAPTIVE} <= greedy
    assert not any("confidence" in name for name in sampled)
    assert "window, shadow price" in sampled


class Engine:
    """Decodes at a rate that depends on its settings alone."""

    alive = True

    def __init__(self, folder: Path, name: str, clock: list[float]) -> None:
        self.log = folder / f"{name}.log"
        self.log.write_text("")
        self.name, self.clock, self.text, self.steps = name, clock, "", 0
        self.asked: list[dict[str, Any]] = []

    def ask(self, method: str, /, **given: Any) -> Any:
        if method == "configure":
            self.text = given["text"]
        elif given.get("method") == "probe_timeline" and given["path"]:
            events = [["device", 3, 1, 12, 900, 2e-3, 1e-3, 0, 7]]
            results = [["result", t, t + 1, 4, 40] for t in range(3)]
            Path(given["path"]).write_text(json.dumps([*events, *results]))
        elif method == "generate":
            self.asked.append(given)
        return True

    def answers(self, prompts: Any, new: int, temperature: float = 0.0) -> Any:
        seconds = 2.0 if "gamma: 3" in self.text else 4.0
        self.clock[0] += seconds / (2 if "shadow" in self.text else 1)
        self.steps += 10
        latencies = [seconds * (i + 1) / len(prompts) for i in range(len(prompts))]
        return [{"meta_info": {"e2e_latency": latency}} for latency in latencies]

    def counters(self) -> dict[str, Any]:
        n = self.steps
        counts = {"decode_steps": n, "mixed_steps": n // 2, "verify_rows": n}
        counts["decode_microseconds"] = 100_000 * n
        return {**counts, "accepted_drafts": 3 * n, "draft_lengths": {"4": n}}

    def full_rates(self, running: int, start: int) -> list[float]:
        return [5.0, 7.0, 6.0]


def laboratory(folder: Path, clock: list[float], saved: list[str], **options: Any) -> Any:
    """A lab of such engines; ``saved`` gets what it saves."""
    return argparse.Namespace(
        options=argparse.Namespace(
            requests=[4], new_tokens=(2, 8), gammas=[3, 8], rules=(), out=folder, **options
        ),
        prompts=[[1, 2, 3], [1, 2], [4], [5, 6]],
        engines={name: Engine(folder, name, clock) for name in ENGINES},
        say=lambda text: None,
        late=lambda: False,
        fit_costs=lambda: None,
        save=lambda phase, found: saved.append(json.dumps(found)),
    )


def test_the_best_cells_of_the_sweep_are_repeated(tmp_path, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(gpu_ablation.time, "perf_counter", lambda: clock[0])
    saved: list[Any] = []
    lab = laboratory(tmp_path, clock, saved, temperatures=[0.0, 0.7], repeats=3)
    found = gpu_ablation.ablation(lab)
    assert saved
    assert found["prompts"]["shared_tokens"] == 2
    table = found["temperature 0.0"]
    line = table["refresh, in step"]
    assert sorted(entry["tokens_per_s"] for entry in line["sweep"]) == [8.0, 16.0]
    assert [entry["tokens_per_s"] for entry in line["finals"]] == [16.0] * 3
    assert all("gamma: 3" in entry["settings"] for entry in line["finals"])
    entry = line["finals"][0]
    assert entry["steady_tokens_per_s"] == 6.0
    assert entry["tokens_per_s_of_device_time"] == 32.0
    assert entry["accept_length"] == 4.0
    assert entry["mixed_fraction"] == 0.5
    assert entry["verifies_by_drafts"] == {"4": 10}
    assert entry["tpot_ms"] == {"p50": 125.0, "p99": 250.0}
    texts = summary(table)
    assert "refresh, shadow price over the best fixed length: 1.000" in texts
    assert "our best over the best of prior work: 1.000" in texts
    error = found["cost_model_error"]["window"]
    assert error["median"] == 0.5


def test_rounds_end_in_time(tmp_path):
    lab = argparse.Namespace(late=lambda: True, say=print, prompts=[])
    lab.engines = dict.fromkeys(ENGINES)
    lab.options = argparse.Namespace(repeats=2, requests=[4])
    table: dict[str, Any] = {}
    lines = rows(ENGINES, [3, 5], True)
    gpu_ablation._measure(lab, lines, 0.0, table, lambda: None, 1)  # type: ignore[arg-type]
    assert table == {}


def test_waves_keep_to_the_default_context(tmp_path, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(gpu_ablation.time, "perf_counter", lambda: clock[0])
    lab = laboratory(tmp_path, clock, [], temperatures=[0.0], repeats=2, waves=3)
    found = gpu_ablation.waves(lab)
    assert found["waves"] == 3
    table = found["temperature 0.0"]
    assert {"refresh, in step", "refresh, the paper's rule"} < set(table)
    assert all(name.startswith("refresh, ") for name in table)
    asked = [given for engine in lab.engines.values() for given in engine.asked]
    assert all(len(given["input_ids"]) == len(given["sampling_params"]) == 12 for given in asked)
    (entry, _) = table["refresh, in step"]["finals"]
    assert entry["tokens_per_s"] == 40.0
    assert entry["tokens_per_s_of_device_time"] == 3500.0


def test_percentiles_are_values_that_occurred():
    assert percentile([1.0, 2.0, 3.0, 4.0], 50) == 2.0
    assert percentile([1.0, 2.0, 3.0, 4.0], 99) == 4.0
    assert percentile([1.0], 50) == 1.0


def test_the_worst_bucket_is_the_one_with_the_largest_median_error():
    near = [["device", 1, 1, 16, 1000, 1.0, 1.1, 0.0]] * 12
    far = [["device", 1, 1, 64, 9000, 1.0, 0.7, 0.0]] * 8
    few = [["device", 1, 1, 999, 9000, 1.0, 9.0, 0.0]]
    found = errors_by_bucket([*near, *far, *few, ["launch", 1, 2]])
    assert found["steps"] == 21
    assert found["median"] == pytest.approx(0.1)
    assert found["worst_bucket"][1] == pytest.approx(0.3)
    assert found["buckets"] == 2


def test_lengths_are_even_on_a_logarithm_and_reproducible():
    lengths = mixed_lengths(256, 500, 7500)
    assert lengths == mixed_lengths(256, 500, 7500)
    assert 500 <= min(lengths) < 510
    assert 7400 < max(lengths) <= 7500
    assert abs(sorted(lengths)[128] - (500 * 7500) ** 0.5) < 20


def test_a_chain_of_sums_is_right():
    class Characters:
        def encode(self, text: str, **_: Any) -> list[int]:
            return [ord(c) for c in text]

    text = "".join(map(chr, sums(Characters(), 400, seed=1)))
    assert len(text) == 400
    lines = text.splitlines()[:-1]
    results = [line.split(" = ") for line in lines]
    assert all(eval(sum_) == int(result) for sum_, result in results)
    for (_, result), (sum_, _) in pairwise(results):
        assert sum_.startswith(f"{result} ")


def test_shared_prefixes_are_counted_once():
    assert shared_tokens([[1, 2, 3], [1, 2, 4, 5], [9], [1]]) == 3
