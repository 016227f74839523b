"""Whole engines on the GPU whose draft rows have page lists per layer: texts, KV and samples
against stock fa3, as ``test_engine.py`` compares the default context's.

Takes about five minutes, of which two are starts. The model comes from the package index, or from
``ASPIRE_TEST_MODEL``.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import pytest

pytest.importorskip("sglang")

from bench import gpu_exact, gpu_lab

TAU = 0.26
"""As for other contexts, see ``test_engine.py``."""

VARIANTS = ("hybrid", "hybrid_shared", "hybrid_page16", "hybrid_covered", "hybrid_tiny")
VARIANTS += ("hybrid_eager", "per_layer")


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory):
    given = os.environ.get("ASPIRE_TEST_MODEL")
    if given is None:
        from bench.smollm2 import model_path

        given = str(model_path())
    started = gpu_lab.Lab(
        argparse.Namespace(
            model=given,
            out=tmp_path_factory.mktemp("engines"),
            engines=["stock", "overlap", *VARIANTS],
            tp_size=1,
            requests=[16],
            prompt_tokens=7000,
            mixed=None,
            new_tokens=(32, 96),
            start_timeout=300.0,
            commit=None,
            sampled=["hybrid_tiny"],
        )
    )
    yield started
    for engine in started.engines.values():
        engine.process.kill()


@pytest.fixture(scope="module")
def found(lab) -> dict[str, Any]:
    return gpu_lab.texts(lab)


def draft_rate(found: dict[str, Any], name: str) -> float:
    """Share of the drafts that was accepted."""
    counters = found[name]["counters"]
    accepted: int = counters["accepted_drafts"]
    return accepted / (accepted + counters["discarded_drafts"])


@pytest.mark.parametrize("name", VARIANTS)
def test_greedy_texts_part_from_stock_only_where_stock_is_undecided(found, name):
    assert found[name]["texts"] == 16
    assert found[name]["worst_gap"] <= TAU, found[name]["splits"]


@pytest.mark.parametrize("name", VARIANTS)
def test_stock_finds_every_text_greedy(found, name):
    allowed = max(gpu_exact.allowed_gap(found["stock"]["gaps"]), TAU)
    assert max(found[name]["gaps"]) <= allowed


@pytest.mark.parametrize("name", VARIANTS)
def test_the_kv_left_behind_is_as_near_to_a_prefill_as_stock_leaves_it(found, name):
    ours, stock = found[name]["kv"], found["stock"]["kv"]
    for mine, other in zip(ours["median_by_layer"], stock["median_by_layer"], strict=True):
        assert mine <= 1.3 * other + 1e-4
    assert max(ours["worst_by_layer"]) <= 2.0 * max(stock["worst_by_layer"])


@pytest.mark.parametrize("name", VARIANTS)
def test_speculation_ran_as_asked(found, name):
    counters = found[name]["counters"]
    assert counters["accepted_drafts"] > 500
    assert bool(counters.get("eager_steps")) == (name == "hybrid_eager")
    assert bool(counters.get("graph_steps")) == (name != "hybrid_eager")


def test_drafts_equal_the_target_where_the_budget_covers_the_context(found):
    assert draft_rate(found, "hybrid_covered") >= 0.99


def test_tiny_contexts_are_rejected_often(found):
    """Or the checks above would say little about rejections."""
    assert draft_rate(found, "hybrid_tiny") <= 0.85


@pytest.mark.parametrize("name", ["hybrid", "hybrid_shared", "hybrid_page16", "hybrid_eager"])
def test_drafts_are_as_good_as_those_of_one_list(found, name):
    assert draft_rate(found, name) >= draft_rate(found, "overlap") - 0.02


def test_samples_follow_the_target(lab):
    drawn = gpu_lab.distributions(lab)["hybrid_tiny"]
    for place in (*drawn["exact"], *drawn["filtered"]):
        assert place.get("p", 1.0) > 1e-3, drawn
        assert not place.get("only_ours"), drawn
    assert any("p" in place for place in drawn["exact"])
    assert drawn["counters"]["accepted_drafts"] > 1000
