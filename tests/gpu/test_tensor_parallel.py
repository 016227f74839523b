"""Two GPUs: the same texts as stock's, the same decisions on both ranks, and a clean end.

Takes about four minutes. The model is the one of ``test_engine.py`` with a KV head more, so that
two ranks can share it out; ``ASPIRE_TEST_MODEL`` names the model without.

Servers refuse several GPUs until these tests have passed on two; the engines here do not.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from bench import gpu_exact, gpu_lab, gpu_ranks
from bench.head_padding import pad_heads

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

TAU = 0.26
"""As for one GPU, see ``test_engine.py``."""

VARIANTS = ("eager", "overlap", "phases")
CHECKED = ("checked", "checked_phases")


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory):
    given = os.environ.get("ASPIRE_TEST_MODEL")
    if given is None:
        from bench.smollm2 import model_path

        given = str(model_path())
    started = gpu_lab.Lab(
        argparse.Namespace(
            model=str(pad_heads(Path(given), tmp_path_factory.mktemp("model"), ranks=2)),
            out=tmp_path_factory.mktemp("engines"),
            engines=["stock", *VARIANTS, "one_rank", *CHECKED],
            tp_size=2,
            requests=[16],
            prompt_tokens=7000,
            mixed=None,
            new_tokens=(32, 96),
            start_timeout=300.0,
            commit=None,
        )
    )
    yield started
    for engine in started.engines.values():
        engine.process.kill()


@pytest.fixture(scope="module")
def found(lab) -> dict[str, Any]:
    result = gpu_lab.texts(lab)
    lab.save("texts", result)
    return result


@pytest.mark.parametrize("name", VARIANTS)
def test_greedy_texts_part_from_stock_only_where_stock_is_undecided(found, name):
    assert found[name]["texts"] == 16
    assert found[name]["worst_gap"] <= TAU, found[name]["splits"]


@pytest.mark.parametrize("name", VARIANTS)
def test_stock_finds_every_text_greedy(found, name):
    allowed = max(gpu_exact.allowed_gap(found["stock"]["gaps"]), TAU)
    assert max(found[name]["gaps"]) <= allowed


@pytest.mark.parametrize("name", VARIANTS)
def test_speculation_ran(found, name):
    counters = found[name]["counters"]
    assert counters["accepted_drafts"] > (200 if name == "phases" else 500)
    assert bool(counters.get("graph_steps")) == (name != "eager")


def test_drafts_are_as_good_as_on_one_gpu(found):
    rates = [
        found[name]["counters"]["accepted_drafts"] / found[name]["counters"]["draft_rows"]
        for name in ("one_rank", "overlap")
    ]
    assert abs(rates[0] - rates[1]) < 0.03, rates


@pytest.fixture(scope="module")
def loaded(lab) -> dict[str, Any]:
    result = gpu_ranks.ranks(lab)
    lab.save("ranks", result)
    return result


@pytest.mark.parametrize("name", CHECKED)
def test_a_thousand_requests_without_a_disagreement(loaded, name):
    result = loaded[name]
    assert result["requests"] == 1000
    assert result["ranks"]["tp_size"] == 2
    assert result["ranks"]["checked_steps"] == result["steps_in_all"]
    assert result["counters"]["accepted_drafts"] > 1000
    assert result["counters"]["discarded_drafts"] > 1000
    assert result["ends"].get("abort")


def test_a_killed_rank_ends_the_engine(lab):
    """Last: the engine is gone."""
    found = gpu_ranks.killed_rank(lab)
    lab.save("killed_rank", found)
    assert not found["left"]
    assert found["seconds"] < 30
