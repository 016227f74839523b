"""Whole engines on the GPU: what every way to run a step writes, against stock fa3.

Takes about six minutes, of which two are starts. The model comes from the package index, or from
``ASPIRE_TEST_MODEL``.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import pytest

pytest.importorskip("sglang")

from bench import gpu_exact, gpu_lab

# bfloat16 logits of this model are multiples of 1/8 where they decide: two of these apart is
# undecided, and batches of different shapes round differently.
TAU = 0.26
VARIANTS = ("eager", "graphs", "overlap", "single_steps", "phases", "covered", "page16", "page64")
VARIANTS += ("tiny",)
PAGES = ("overlap", "page16", "page64")


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
            engines=["stock", *VARIANTS, "broken"],
            tp_size=1,
            requests=[16],
            prompt_tokens=7000,
            mixed=None,
            new_tokens=(32, 96),
            start_timeout=300.0,
            commit=None,
            sampled=["overlap", "tiny"],
        )
    )
    yield started
    for engine in started.engines.values():
        engine.process.kill()


@pytest.fixture(scope="module")
def found(lab) -> dict[str, Any]:
    return gpu_lab.texts(lab)


@pytest.mark.parametrize("name", VARIANTS)
def test_greedy_texts_part_from_stock_only_where_stock_is_undecided(found, name):
    result = found[name]
    assert result["texts"] == 16
    assert result["worst_gap"] <= TAU, result["splits"]


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


def test_kv_of_draft_rows_would_be_found(found):
    broken, stock = found["broken"]["kv"], found["stock"]["kv"]
    assert max(broken["worst_by_layer"]) > 4.0 * max(stock["worst_by_layer"])


@pytest.mark.parametrize("name", VARIANTS)
def test_speculation_ran(found, name):
    counters = found[name]["counters"]
    assert counters["accepted_drafts"] > (200 if name == "phases" else 500)
    assert counters["plain_graph_steps" if name == "phases" else "mixed_steps"] > 20


def test_steps_ran_as_asked(found):
    assert found["eager"]["counters"]["graph_steps"] == 0
    for name in set(VARIANTS) - {"eager"}:
        assert not found[name]["counters"].get("eager_steps")


def test_drafts_equal_the_target_where_the_budget_covers_the_context(found):
    counters = found["covered"]["counters"]
    drafts = counters["accepted_drafts"] + counters["discarded_drafts"]
    assert counters["accepted_drafts"] >= 0.99 * drafts


def test_tiny_contexts_are_rejected_often(found):
    """Or the checks above would say little about rejections."""
    counters = found["tiny"]["counters"]
    assert counters["discarded_drafts"] >= 0.2 * counters["accepted_drafts"]


@pytest.fixture(scope="module")
def drawn(lab) -> dict[str, Any]:
    return gpu_lab.distributions(lab)


@pytest.mark.parametrize("name", ["overlap", "tiny"])
def test_samples_follow_the_target(drawn, name):
    for place in (*drawn[name]["exact"], *drawn[name]["filtered"]):
        assert place.get("p", 1.0) > 1e-3, drawn[name]
        assert not place.get("only_ours"), drawn[name]
    assert any("p" in place for place in drawn[name]["exact"])
    assert drawn[name]["counters"]["accepted_drafts"] > 1000
