"""Start an SGLang server, wait until it answers, and leave no process behind."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import IO

import httpx
from rich.console import Console

from aspire_sglang.cli.process_tree import kill_session

HOST = "127.0.0.1"

# What SGLang logs when a subprocess died; its main process may then hang for another minute.
FATAL_LOG_LINES = ("Scheduler hit an exception", "Received sigquit from a child process")


class ServerError(RuntimeError):
    """The server did not come up; the message ends with the end of its log."""


def free_port() -> int:
    """A port that nothing listens on right now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def plain_args(
    model: Path,
    *,
    dtype: str = "float32",
    context_length: int = 8192,
    max_total_tokens: int = 65536,
    chunked_prefill_size: int = 2048,
    max_running_requests: int = 16,
    attention_backend: str = "aspire",
    extra: Sequence[str] = (),
) -> list[str]:
    """Flags of a server with plain decoding on the CPU."""
    flags = {
        "--model-path": model,
        "--device": "cpu",
        "--dtype": dtype,
        "--attention-backend": attention_backend,
        "--context-length": context_length,
        "--max-total-tokens": max_total_tokens,
        "--chunked-prefill-size": chunked_prefill_size,
        "--max-running-requests": max_running_requests,
        "--random-seed": 0,
        # The polling of this file would fill the log.
        "--log-level-http": "warning",
    }
    return [str(part) for flag in flags.items() for part in flag] + list(extra)


def aspire_args(plain: Sequence[str], config: Path | None = None) -> list[str]:
    """The same flags with speculation on: nothing else differs between the two servers."""
    flags = [*plain, "--speculative-algorithm", "ASPIRE"]
    return flags if config is None else [*flags, "--aspire-config", str(config)]


class Server:
    """A running SGLang server: ``with Server(plain_args(model)) as server: ... server.url``."""

    def __init__(
        self,
        args: Sequence[str],
        *,
        log: Path,
        name: str = "server",
        port: int | None = None,
        env: dict[str, str] | None = None,
        timeout_s: float = 300.0,
        patience_s: float = 5.0,
        console: Console | None = None,
    ) -> None:
        self.name = name
        self.log = log
        self.port = port or free_port()
        self.url = f"http://{HOST}:{self.port}"
        self.command = [sys.executable, "-m", "sglang.launch_server", *args]
        self.command += ["--host", HOST, "--port", str(self.port)]
        self._env = _environment() | (env or {})
        self._timeout_s = timeout_s
        self._patience_s = patience_s
        self._console = console or Console(stderr=True)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Process id of the server's main process."""
        if self._process is None:
            raise ServerError(f"the {self.name} was not started")
        return self._process.pid

    def __enter__(self) -> Server:
        try:
            self.start()
            self.wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        if kind is KeyboardInterrupt:
            self._console.print(f"stopping the {self.name}")
        self.stop()

    def start(self) -> None:
        """Start the process; it answers some time later, see ``wait_ready``."""
        _require_free(self.port)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        atexit.register(self.stop)
        with self.log.open("wb") as log:
            # Its own session: Ctrl-C in the terminal reaches us only, and we end it in order.
            self._process = _spawn(self.command, log, self._env)

    def wait_ready(self) -> None:
        """Return when the server generates, raise ``ServerError`` if it died or takes too long."""
        deadline = time.monotonic() + self._timeout_s
        with (
            self._console.status(f"starting the {self.name}") as status,
            httpx.Client(timeout=30, trust_env=False) as client,
        ):
            while not self._answers(client):
                self._require_alive()
                if time.monotonic() > deadline:
                    raise self._error(f"did not answer within {self._timeout_s:.0f} s")
                last = next(iter(self._tail(1)), "")
                status.update(f"starting the {self.name}: [dim]{_escape(last[-90:])}[/dim]")
                time.sleep(1)

    def stop(self) -> None:
        """End the server with all its processes. Safe to call again."""
        atexit.unregister(self.stop)
        process, self._process = self._process, None
        if process is None:
            return
        with signals_held():
            kill_session(process.pid, self._patience_s)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=5)

    def wait(self) -> int:
        """Block until the server ends by itself."""
        if self._process is None:
            raise ServerError(f"the {self.name} was not started")
        return self._process.wait()

    def _answers(self, client: httpx.Client) -> bool:
        try:
            return client.get(f"{self.url}/health_generate").status_code == 200
        except httpx.TransportError:
            return False

    def _require_alive(self) -> None:
        code = None if self._process is None else self._process.poll()
        if code is not None:
            raise self._error(f"ended with exit status {code}")
        if any(fatal in line for line in self._tail(200) for fatal in FATAL_LOG_LINES):
            raise self._error("crashed while starting")

    def _error(self, what: str) -> ServerError:
        tail = "\n".join(f"  | {line}" for line in self._tail(25))
        return ServerError(f"The {self.name} {what}. End of its log, {self.log}:\n{tail}")

    def _tail(self, lines: int) -> list[str]:
        try:
            with self.log.open("rb") as log:
                log.seek(max(0, os.fstat(log.fileno()).st_size - 64 * 1024))
                # Progress bars use carriage returns; splitlines() keeps their last state a line.
                text = log.read().decode(errors="replace")
        except OSError:
            return []
        return [line.rstrip() for line in text.splitlines() if line.strip()][-lines:]


def _spawn(command: list[str], log: IO[bytes], env: dict[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        env=env,
        start_new_session=True,
    )


def _environment() -> dict[str, str]:
    """Our environment, and no look at the network for a model that lies on the disk."""
    return {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"} | dict(os.environ)


def _require_free(port: int) -> None:
    with socket.socket() as probe:
        # As the server does, so that a port in TIME_WAIT counts as free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise ServerError(f"Port {port} is in use; choose another one with --port.") from error


def _escape(text: str) -> str:
    return text.replace("[", r"\[")


@contextlib.contextmanager
def signals_held() -> Iterator[None]:
    """Ignore a second Ctrl-C while processes are being ended: it would leave some behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    names = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {name: signal.signal(name, signal.SIG_IGN) for name in names}
    try:
        yield
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)


def exit_on_signals() -> None:
    """Make SIGTERM and SIGHUP end the script as Ctrl-C does: through ``finally`` and ``with``."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, leave)
    # Under nohup it is ignored, and shall stay so.
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, leave)
    # A script started in the background (`make demo &`) inherits an ignored SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)
