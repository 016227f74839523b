"""Whole engines on the GPU: greedy texts of every way to run a step against stock fa3.

Takes about two minutes. The model comes from the package index, or from ``ASPIRE_TEST_MODEL``.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sglang")

from bench import gpu_engine

# bfloat16 logits of this model are multiples of 1/8 where they decide: two of these apart is
# undecided, and batches of different shapes round differently.
TAU = 0.26
VARIANTS = ("stock", "eager", "graphs", "overlap", "covered")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    given = os.environ.get("ASPIRE_TEST_MODEL")
    if given is None:
        from bench.smollm2 import model_path

        given = str(model_path())
    out: Path = tmp_path_factory.mktemp("engines")
    variants = [gpu_engine.Variant(name, given, 200_000, out) for name in VARIANTS]
    try:
        prompts = gpu_engine.load_prompts(given, 16, 6500)
        for variant in variants:
            assert variant.receive(200.0), f"{variant.name} did not start"
        some = [prompt[: 500 + 400 * i] for i, prompt in enumerate(prompts)]
        return gpu_engine.check(variants, some, 96)
    finally:
        for variant in variants:
            variant.process.kill()


@pytest.mark.parametrize("name", VARIANTS[1:])
def test_greedy_texts_follow_stock(found, name):
    result = found[name]
    assert result["texts"] == 16
    assert result["worst_gap"] <= TAU, result["splits"]


@pytest.mark.parametrize("name", VARIANTS[1:])
def test_speculation_ran(found, name):
    counters = found[name]["counters"]
    assert counters["accepted_drafts"] > 500
    assert counters["mixed_steps"] > 20


def test_steps_ran_as_asked(found):
    assert "graph_steps" not in found["eager"]["counters"]
    for name in ("graphs", "overlap", "covered"):
        assert not found[name]["counters"].get("eager_steps")


def test_drafts_equal_the_target_where_the_budget_covers_the_context(found):
    counters = found["covered"]["counters"]
    drafts = counters["accepted_drafts"] + counters["discarded_drafts"]
    assert counters["accepted_drafts"] >= 0.99 * drafts
