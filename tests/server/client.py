"""A small client for server tests, and the invariants that hold after each of them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Self

import httpx

from aspire_sglang.cli.server import Server


@dataclass
class Client:
    """Talks to one server; ``speculates`` says whether invariant I4 applies."""

    server: Server
    speculates: bool
    tokenizer: Any
    answers: list[dict[str, Any]] = field(default_factory=list)
    log_start: int = 0

    def begin_test(self) -> None:
        """Judge the next test by its own answers and its own part of the log."""
        self.answers.clear()
        self.log_start = len(self.server.log.read_text(errors="replace"))

    @contextmanager
    def judged(self) -> Iterator[Self]:
        """For one test, after which the invariants must hold."""
        self.begin_test()
        yield self
        self.assert_invariants()

    def __post_init__(self) -> None:
        self.http = httpx.Client(
            base_url=self.server.url,
            timeout=600,
            trust_env=False,
            limits=httpx.Limits(max_connections=128, max_keepalive_connections=32),
        )

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def post(self, body: dict[str, Any], path: str = "/generate") -> httpx.Response:
        return self.http.post(path, json=body)

    def generate(self, prompt: str | list[int], **options: Any) -> dict[str, Any]:
        """One request; sampling parameters and top-level fields may be given side by side."""
        reply = self.post(request(prompt, **options))
        assert reply.status_code == 200, reply.text
        answer = reply.json()
        self.answers += answer if isinstance(answer, list) else [answer]
        return answer

    def generate_all(self, prompts: list[Any], **options: Any) -> list[dict[str, Any]]:
        """The same request for each prompt, all at once."""
        with ThreadPoolExecutor(max(1, min(len(prompts), 64))) as pool:
            return list(pool.map(lambda prompt: self.generate(prompt, **options), prompts))

    def aspire(self) -> dict[str, Any]:
        return self.http.get("/server_info").json()["internal_states"][0]["aspire"]

    def metric(self, name: str) -> float:
        for line in self.http.get("/metrics").text.splitlines():
            if line.startswith((name + "{", name + " ")):
                return float(line.rsplit(" ", 1)[1])
        raise KeyError(name)

    def flush(self) -> None:
        deadline = time.monotonic() + 30
        while True:
            reply = self.post({}, "/flush_cache")
            if reply.status_code == 200 and reply.text.startswith("Cache flushed"):
                return
            assert time.monotonic() < deadline, reply.text
            time.sleep(0.2)

    def wait_idle(self, seconds: float = 20) -> None:
        """Until no request runs or waits."""
        deadline = time.monotonic() + seconds
        while self.load() > 0:
            assert time.monotonic() < deadline, "requests still running"
            time.sleep(0.1)

    def load(self) -> float:
        return self.metric("sglang:num_running_reqs") + self.metric("sglang:num_queue_reqs")

    def assert_invariants(self) -> None:
        """I1: nothing leaked, server alive. I2/I3: counts agree and budgets hold."""
        # Not /health_generate, which waits a second before it looks.
        assert self.post(request([1], max_new_tokens=1)).status_code == 200
        self.flush()
        log = self.server.log.read_text(errors="replace")[self.log_start :]
        for fault in ("leak detected", "Scheduler hit an exception", "Traceback"):
            assert fault not in log, log[max(0, log.index(fault) - 500) : log.index(fault) + 3000]
        for answer in self.answers:
            meta = answer["meta_info"]
            if "output_ids" in answer:
                assert len(answer["output_ids"]) == meta["completion_tokens"]
        self.answers.clear()


def request(prompt: str | list[int], **options: Any) -> dict[str, Any]:
    """Body of a ``/generate`` request."""
    body: dict[str, Any] = {"text": prompt} if isinstance(prompt, str) else {"input_ids": prompt}
    top_level = {
        "stream", "return_logprob", "logprob_start_len", "top_logprobs_num", "token_ids_logprob",
        "rid", "return_hidden_states", "lora_path", "custom_logit_processor", "stream_options",
        "return_entropy", "return_sampling_mask", "session_params",
    }  # fmt: skip
    body |= {key: options.pop(key) for key in top_level & options.keys()}
    return body | {"sampling_params": {"temperature": 0, **options}}
