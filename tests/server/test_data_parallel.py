"""``--dp-size 2`` on a CPU: two replicas behind SGLang's controller, each speculates for itself."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from aspire_sglang.cli.server import plain_args
from tests.server import tiny_model
from tests.server.conftest import DRAFTING, Aspire, serving, speculated
from tests.server.scoring import TAU
from tests.server.test_tensor_parallel import CONTEXT, prompt

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

REPLICAS = 2


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.save(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def replicas(tiny: Path, logs: Path) -> Iterator[Aspire]:
    args = plain_args(
        tiny,
        context_length=tiny_model.CONTEXT,
        max_total_tokens=20_000,
        max_running_requests=24,
        extra=("--skip-tokenizer-init", "--enable-metrics", "--dp-size", str(REPLICAS)),
    )
    with serving(args, "replicas", logs, None, settings="") as client:
        yield client


def states(client: Aspire) -> list[dict]:
    """The block of each replica."""
    listed = client.http.get("/server_info").json()["internal_states"]
    assert len(listed) == REPLICAS
    return [state["aspire"] for state in listed]


def reload(client: Aspire, text: str) -> None:
    client.config_file.write_text(text)
    body = {"server_args": {"aspire_reload_config": 1}}
    assert client.post(body, "/set_internal_state").json() == [True] * REPLICAS


def test_both_replicas_speculate_and_add_up(replicas, tiny):
    import yaml

    reload(replicas, yaml.safe_dump({**DRAFTING, **CONTEXT}))
    before = states(replicas)
    rng = random.Random(1)
    prompts = [prompt(rng, length) for length in (5, 40, 90, 150, 300, 500, 900, 1500)]
    answers = replicas.generate_all(prompts, max_new_tokens=40, ignore_eos=True)
    speculated(answers)
    after = states(replicas)

    def gained(name: str) -> list[int]:
        return [new[name] - old.get(name, 0) for old, new in zip(before, after, strict=True)]

    # Each replica counts its own requests, and responses tell the same story as the two together.
    assert all(count > 0 for count in gained("accepted_drafts")), gained("accepted_drafts")
    assert all(count > 0 for count in gained("discarded_drafts"))
    meta = [answer["meta_info"] for answer in answers]
    assert sum(gained("accepted_drafts")) == sum(m["spec_num_correct_drafts"] for m in meta)
    assert sum(gained("verify_rows")) == sum(m["aspire"]["verify_steps"] for m in meta)
    served = [set(state["requests"]) for state in after]
    assert not served[0] & served[1]
    ids = {m["id"] for m in meta}
    assert ids <= served[0] | served[1]
    assert ids & served[0]
    assert ids & served[1]

    model = tiny_model.load(tiny)
    for given, answer in zip(prompts, answers, strict=True):
        assert max(tiny_model.gaps(model, given, answer["output_ids"])) <= TAU


def test_metrics_of_replicas_are_apart(replicas):
    replicas.generate_all([[5] * 30] * 8, max_new_tokens=24, ignore_eos=True)
    lines = replicas.http.get("/metrics").text.splitlines()
    lengths = [line for line in lines if line.startswith("sglang:spec_accept_length{")]
    assert sorted(line.split('dp_rank="')[1][0] for line in lengths) == ["0", "1"], lengths
    generated = [line for line in lines if line.startswith("sglang:generation_tokens_total{")]
    assert sum(float(line.rsplit(" ", 1)[1]) for line in generated) >= 8 * 24


def test_cores_are_shared_out(replicas):
    log = replicas.server.log.read_text()
    cores = max(1, len(os.sched_getaffinity(0)) // REPLICAS)
    assert log.count(f"aspire-cpu: {cores} threads for this rank") == REPLICAS
