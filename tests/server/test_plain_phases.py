"""Phases of plain steps in SGLang's real scheduler, in and out at random, with and without overlap.

The servers run on the CPU with :mod:`tests.server.phases_plugin`; a GPU runs the same code.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from aspire_sglang.cli.server import Server, aspire_args, plain_args
from tests.server import phases_plugin
from tests.server.client import Client, request
from tests.server.conftest import CHECKS, COMMON, Aspire
from tests.server.prompts import COUNT, LOOP, PROSE, SHORT

pytestmark = pytest.mark.slow

FIXED = {"scheduler": {"policy": "fixed", "gamma": 3}, "gamma_max": 16}
SIZES = {"max_total_tokens": 8000, "max_running_requests": 8}
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def plain(model: Path, logs: Path, tokenizer: Any) -> Iterator[Client]:
    args = plain_args(model, extra=COMMON, **SIZES)
    with Server(args, log=logs / "phases-plain.log", name="plain server") as running:
        yield Client(running, False, tokenizer)


@pytest.fixture(scope="module", params=["", "1"], ids=["in-turn", "overlap"])
def server(request: Any, model: Path, logs: Path, tokenizer: Any) -> Iterator[Aspire]:
    name = "phases-overlap" if request.param else "phases"
    folder = logs / name
    phases_plugin.install(folder)
    config = logs / f"{name}.yaml"
    config.write_text("")
    places = [str(folder), str(ROOT), os.environ.get("PYTHONPATH", "")]
    env = {
        **CHECKS,
        "PYTHONPATH": os.pathsep.join(place for place in places if place),
        "PHASES_OVERLAP": request.param,
        "SGLANG_TEST_RETRACT": "1",
        "SGLANG_TEST_RETRACT_INTERVAL": "23",
    }
    args = plain_args(model, extra=COMMON, **SIZES)
    with Server(aspire_args(args, config), log=logs / f"{name}.log", name=name, env=env) as running:
        client = Aspire(running, True, tokenizer)
        client.config_file = config
        yield client


@pytest.fixture
def phases(server: Aspire) -> Iterator[Aspire]:
    with server.judged() as client:
        client.configure(FIXED)
        yield client


def test_texts_are_those_of_plain_decoding(plain, phases):
    lengths = [5 + 7 * i for i in range(12)]
    bodies = [
        request(prompt, max_new_tokens=n, ignore_eos=True)
        for prompt, n in zip([LOOP, COUNT, PROSE, *SHORT[:9]], lengths, strict=True)
    ]
    with ThreadPoolExecutor(12) as pool:
        found = list(pool.map(lambda body: phases.post(body).json(), bodies))
        expected = list(pool.map(lambda body: plain.post(body).json(), bodies))
    same = sum(a["output_ids"] == b["output_ids"] for a, b in zip(found, expected, strict=True))
    assert same >= 11
    for answer, length in zip(found, lengths, strict=True):
        assert answer["meta_info"]["completion_tokens"] == length
    block = phases.aspire()
    assert block["plain_graph_steps"] > 20
    assert block["draft_rows"] > 20


def test_every_token_is_counted_once(phases, request):
    """Plain steps are verifies of no drafts.

    The CPU's worker does not know what is still unsettled with overlap scheduling, so there its
    last run may go beyond the end of the text.
    """
    beyond = FIXED["scheduler"]["gamma"] if "overlap" in request.node.name else 0
    for length in (2, 3, 30, 77):
        meta = phases.generate(LOOP, max_new_tokens=length, ignore_eos=True)["meta_info"]
        if meta.get("num_retractions"):
            continue
        verifies, accepted = meta["spec_verify_ct"], meta["spec_num_correct_drafts"]
        assert meta["completion_tokens"] == length
        assert length <= 1 + verifies + accepted <= length + beyond
        assert meta["aspire"]["verify_steps"] == verifies
        assert sum(meta["spec_correct_drafts_histogram"]) == verifies


def test_stops_and_streams(plain, phases):
    for options in ({"stop": "12"}, {"stop": ["9,", "zzz"]}, {"max_new_tokens": 1}):
        given = {"max_new_tokens": 60, **options}
        ours, theirs = phases.generate(COUNT, **given), plain.generate(COUNT, **given)
        assert ours["text"] == theirs["text"]
        assert ours["meta_info"]["finish_reason"] == theirs["meta_info"]["finish_reason"]


def test_aborted_requests_leave_nothing(phases):
    def one(index: int) -> Any:
        return phases.post(request(SHORT[index], max_new_tokens=4000, rid=f"long-{index}"))

    with ThreadPoolExecutor(5) as pool:
        running = [pool.submit(one, index) for index in range(5)]
        phases.generate(COUNT, max_new_tokens=80)
        for index in range(5):
            phases.http.post("/abort_request", json={"rid": f"long-{index}"})
        for each in running:
            each.result()
