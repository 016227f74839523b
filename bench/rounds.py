"""Send all requests of the demo at once and watch their tokens come in."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from aspire_sglang.cli.texts import Prompt, TextTokenizer, encode
from bench.answer import Answer
from bench.doors import DOORS


@dataclass(frozen=True)
class Request:
    """A prompt and the door it goes through."""

    door: str
    prompt: Prompt


@dataclass(frozen=True)
class Round:
    """The answers to one set of concurrent requests."""

    answers: list[Answer]
    seconds: float


def run_round(
    url: str,
    requests: Sequence[Request],
    new_tokens: int,
    *,
    label: str,
    console: Console,
) -> Round:
    """Send every request at the same time; return when all are answered.

    Answers that came as text have no ``output_ids`` yet, see :func:`add_output_ids`.
    """
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("tokens"),
        TimeElapsedColumn(),
        console=console,
        # A log file shall not be filled with frames.
        disable=not console.is_terminal,
    )
    if not console.is_terminal:
        console.print(f"{label}: {len(requests)} concurrent requests")
    start = time.perf_counter()
    pool = ThreadPoolExecutor(len(requests))
    try:
        with progress:
            futures = []
            for i, request in enumerate(requests):
                prompt, door = request.prompt, DOORS[request.door]
                name = f"{label} {i + 1}: {prompt.kind}, {len(prompt.input_ids)} tokens"
                task = progress.add_task(name, total=new_tokens)

                def on_tokens(tokens: int, task=task) -> None:
                    progress.update(task, completed=tokens)

                rid = f"demo-{label}-{i}-{time.time_ns():x}"
                futures.append(pool.submit(door, url, prompt, new_tokens, rid, on_tokens))
            wait(futures, return_when=FIRST_EXCEPTION)
            answers = [future.result() for future in futures]
    finally:
        # Not waited for: after Ctrl-C or a fault the answers end with the server, not before.
        pool.shutdown(wait=False, cancel_futures=True)
    seconds = time.perf_counter() - start
    for answer in answers:
        if answer.prompt_tokens != len(answer.prompt_ids):
            raise RuntimeError(
                f"the server counted {answer.prompt_tokens} prompt tokens, "
                f"but {len(answer.prompt_ids)} were sent"
            )
    return Round(answers, seconds)


def add_output_ids(url: str, answers: Sequence[Answer], tokenizer: TextTokenizer, end: int) -> None:
    """Find the token ids of answers that came as text; ``end`` is the model's end token.

    May ask the server again, which moves its counters: read those first.
    """
    for answer in answers:
        if not answer.output_ids:
            answer.output_ids = _output_ids(tokenizer, end, answer, url)


def _output_ids(tokenizer: TextTokenizer, end_token: int, answer: Answer, url: str) -> list[int]:
    """Token ids of an answer that came as text.

    A text can have more than one tokenization. Where the counts show that ours is another one than
    the model's, the server is asked once more, and its ids count if its text is the same.
    """
    ids = encode(tokenizer, answer.text)
    if len(ids) == answer.completion_tokens - 1:
        # The token that ended the answer is counted but not in the text.
        ids.append(end_token)
    if len(ids) == answer.completion_tokens:
        return ids
    prompt = Prompt("", "", "", tuple(answer.prompt_ids))
    again = DOORS["/generate"](
        url, prompt, answer.completion_tokens, f"{answer.rid}-ids", lambda _: None
    )
    return again.output_ids if again.text == answer.text else []
