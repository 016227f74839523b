"""Two servers on one model, started once: plain decoding, and ASPIRE with the same settings."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from aspire_sglang.cli.server import Server, aspire_args, plain_args
from bench.smollm2 import model_path
from tests.server.client import Client
from tests.server.tiny import write_tiny_model
from tests.server.tiny_model import CONTEXT as SMALL_CONTEXT
from tests.server.tiny_model import save as save_small_model

START_SECONDS = 900
"""A server starts in half a minute, but not on two busy cores."""

PATIENCE: dict[str, Any] = {"timeout_s": START_SECONDS, "patience_s": 0.1}
"""With a start and with an end: SGLang takes five seconds to obey, and nothing is lost where it is
killed."""

# SGLang's own checks: every busy step verifies that no KV slot is lost.
CHECKS = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1"}
COMMON = (
    "--enable-metrics",
    "--enable-cache-report",
    "--enable-custom-logit-processor",
    "--enable-return-hidden-states",
)

DRAFTING = {"scheduler": {"policy": "staggered", "gamma": 5}}
"""Drafts at every length, also where plain decoding would be faster: tests need speculation."""

FULL = {"context": {"ratio": 1.0}}
"""The budget covers every context, so drafts equal the target and nearly all are accepted."""

TINY = {
    "context": {"page_size": 1, "sink_pages": 0, "last_pages": 2, "min_pages": 2, "ratio": 0.01}
}
"""Draft rows see two or three tokens, so most drafts are rejected."""


def pytest_configure() -> None:
    """Let both signals end the tests in order: servers have sessions of their own and would go on
    when pytest is gone. Not by SystemExit, which pytest takes for a test that failed."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.default_int_handler)


class Aspire(Client):
    """The speculating server, whose configuration a test may change while it runs."""

    config_file: Path

    def configure(self, *parts: dict[str, Any]) -> None:
        """Use the given settings, later ones over earlier ones, and defaults for the rest."""
        merged: dict[str, Any] = {}
        for part in parts:
            for key, value in part.items():
                merged[key] = {**merged.get(key, {}), **value} if isinstance(value, dict) else value
        self.config_file.write_text(yaml.safe_dump(merged))
        body = {"server_args": {"aspire_reload_config": 1}}
        assert self.post(body, "/set_internal_state").json() == [True]


@contextmanager
def serving(
    args: list[str],
    name: str,
    logs: Path,
    tokenizer: Any,
    *,
    settings: str = "cost_profile: false\n",
    env: dict[str, str] = CHECKS,
) -> Iterator[Aspire]:
    """A speculating server for the plain flags ``args``, and its client."""
    config = logs / f"{name}.yaml"
    config.write_text(settings)
    log = logs / f"{name}.log"
    with Server(aspire_args(args, config), log=log, name=name, env=env, **PATIENCE) as started:
        client = Aspire(started, True, tokenizer)
        client.config_file = config
        yield client


@pytest.fixture(scope="session")
def model() -> Path:
    return model_path()


@pytest.fixture(scope="session")
def tokenizer(model: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model)


@pytest.fixture(scope="session")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    kept = os.environ.get("ASPIRE_TEST_LOGS")
    return Path(kept) if kept else tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="session")
def tiny_model(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny-model"), model)


@pytest.fixture(scope="session")
def servers(model: Path, logs: Path, tokenizer: Any) -> Iterator[tuple[Client, Aspire]]:
    config = logs / "aspire.yaml"
    config.write_text("")
    args = plain_args(model, max_total_tokens=48000, max_running_requests=48, extra=COMMON)
    env: dict[str, Any] = {"env": CHECKS, **PATIENCE}
    plain = Server(args, log=logs / "plain.log", name="plain server", **env)
    aspire = Server(aspire_args(args, config), log=logs / "aspire.log", name="ASPIRE", **env)
    with ExitStack() as stack, ThreadPoolExecutor(2) as pool:
        for server in (plain, aspire):
            stack.callback(server.stop)
            server.start()
        list(pool.map(Server.wait_ready, (plain, aspire)))
        speculating = Aspire(aspire, True, tokenizer)
        speculating.config_file = config
        yield Client(plain, False, tokenizer), speculating


@pytest.fixture
def plain(servers: tuple[Client, Aspire]) -> Client:
    client = servers[0]
    client.answers.clear()
    return client


@pytest.fixture
def aspire(servers: tuple[Client, Aspire]) -> Iterator[Aspire]:
    """The speculating server with default settings; checks the invariants afterwards."""
    with servers[1].judged() as client:
        client.configure()
        yield client


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_small_model(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="session")
def small_server(small_model: Path, logs: Path) -> Iterator[Aspire]:
    """ASPIRE on a model so small that it answers thousands of requests in seconds."""
    args = plain_args(
        small_model,
        context_length=SMALL_CONTEXT,
        max_total_tokens=20_000,
        max_running_requests=48,
        extra=("--skip-tokenizer-init", "--enable-metrics"),
    )
    with serving(args, "small", logs, None) as client:
        yield client


@pytest.fixture
def small(small_server: Aspire) -> Iterator[Aspire]:
    with small_server.judged() as client:
        yield client


def speculated(answers: dict[str, Any] | list[dict[str, Any]]) -> None:
    """I4: a test in which nothing was drafted proves nothing."""
    listed = answers if isinstance(answers, list) else [answers]
    drafts = sum(answer["meta_info"].get("aspire", {}).get("draft_steps", 0) for answer in listed)
    assert drafts > 0, "void: speculation did not run"
