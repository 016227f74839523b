"""Prefills replayed from CUDA graphs against eager ones: page lists, texts, accepted drafts.

Takes about a minute and a half, most of which are the starts of two engines. The model comes from
the package index, or from ``ASPIRE_TEST_MODEL``.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sglang")

from bench import gpu_engine, gpu_exact

# As in test_engine.py: two bfloat16 logits so far apart are undecided.
TAU = 0.26
LENGTHS = [700 + 760 * i for i in range(8)]
# What follows the prompts when they are cached.
MORE = 40
NEW_TOKENS = 96
WAYS = ("graphs", "eager")


@dataclass
class Found:
    """What the engine did with graphs and without.

    Attributes:
        prefills: ``[from a graph, tokens]`` each.
        lists: page lists by the length of the context they were made for.
        texts: how the texts compare with stock's.
        gaps: how far their tokens lie below stock's best.
        allowed: how far they may.
        accepted: share of the drafts that was accepted.
    """

    prefills: list[tuple[bool, int]]
    lists: dict[int, list[int]]
    texts: dict[str, Any]
    gaps: list[float]
    allowed: float
    accepted: float


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Found]:
    model = os.environ.get("ASPIRE_TEST_MODEL")
    if model is None:
        from bench.smollm2 import model_path

        model = str(model_path())
    folder = tmp_path_factory.mktemp("prefill")
    engines = [gpu_engine.Variant(name, model, 130_000, folder) for name in ("stock", "overlap")]
    try:
        # Texts that come again are shorter at the front.
        texts = gpu_engine.load_prompts(model, len(LENGTHS), LENGTHS[-1] + 29 * len(LENGTHS))
        for engine in engines:
            print(engine.name, engine.receive(300.0))
            assert engine.alive, engine.log.read_text(errors="replace")[-6000:]
        stock, ours = engines
        prompts = [ids[:length] for ids, length in zip(texts, LENGTHS, strict=True)]
        longer = [p + texts[i - 1][:MORE] for i, p in enumerate(prompts)]
        asked = stock.answers(prompts, NEW_TOKENS, return_logprob=True, top_logprobs_num=2)
        tau = max(gpu_exact.allowed_gap(gpu_exact.score(stock, prompts, asked)), TAU)
        return {
            way: measure(stock, ours, prompts, longer, asked, folder / way, way == "graphs", tau)
            for way in WAYS
        }
    finally:
        for engine in engines:
            engine.process.kill()


def measure(
    stock: Any,
    ours: Any,
    prompts: list[list[int]],
    longer: list[list[int]],
    asked: list[Any],
    path: Path,
    graphs: bool,
    tau: float,
) -> Found:
    ours.ask("flush_cache")
    ours.ask("collective_rpc", method="probe_prefill", path=None, graphs=graphs)
    before = ours.counters()
    answers = ours.answers(prompts, NEW_TOKENS)
    counters = gpu_engine._difference(before, ours.counters())
    ours.answers(longer, 1)
    ours.ask("collective_rpc", method="probe_prefill", path=str(path))
    events = json.loads(path.read_text())
    accepted, discarded = counters["accepted_drafts"], counters["discarded_drafts"]
    return Found(
        prefills=[(graph, tokens) for graph, tokens, _ in events],
        lists={int(length): pages for event in events for length, pages in event[2].items()},
        texts=gpu_exact.compare_texts(answers, asked),
        gaps=gpu_exact.score(stock, prompts, answers),
        allowed=tau,
        accepted=accepted / (accepted + discarded),
    )


def test_prefills_ran_as_asked(found):
    # A single token has no graph: the smallest has four places, and SGLang pads to twice at most.
    assert all(graph == (tokens > 1) for graph, tokens in found["graphs"].prefills)
    assert not any(graph for graph, _ in found["eager"].prefills)
    for way in WAYS:
        # Texts may begin alike.
        assert sum(tokens for _, tokens in found[way].prefills) > sum(LENGTHS)


@pytest.mark.parametrize("more", [0, MORE])
def test_prefills_vote_alike(found, more):
    """After a whole prompt, and after a few tokens behind a cached one."""
    shared = []
    for length in LENGTHS:
        ours, eager = (set(found[way].lists[length + more]) for way in WAYS)
        assert len(ours) == len(eager) > 0
        shared.append(len(ours & eager) / len(ours))
        print(length + more, len(ours), shared[-1])
    # Keys and queries are rounded otherwise: a product of more rows adds up in another order.
    assert min(shared) >= 0.75
    assert sum(shared) / len(shared) >= 0.9


def test_votes_are_not_windows(found):
    """Or equal lists would say nothing."""
    for way in WAYS:
        for length in LENGTHS[4:]:
            pages = found[way].lists[length]
            last = range(pages[-1] - len(pages) + 2, pages[-1] + 1)
            assert len(set(pages) - {0, *last}) >= 4, pages


@pytest.mark.parametrize("way", WAYS)
def test_texts_are_stocks(found, way):
    assert found[way].texts["worst_gap"] <= TAU, found[way].texts
    assert max(found[way].gaps) <= found[way].allowed


def test_as_many_drafts_are_accepted(found):
    graphs, eager = (found[way].accepted for way in WAYS)
    print(graphs, eager)
    assert 0.85 <= graphs / eager <= 1.15
