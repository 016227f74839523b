"""Prompts of a wanted token length, cut from real documents; one seed, one set of prompts."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any, Protocol

from aspire_sglang.cli.sources import Document, code, prose

KINDS = ("continuation", "code", "copy", "chat")

# How far a prompt may be from the wanted length. Spent on ending at the end of a line or word.
TOLERANCE = 0.01

QUESTIONS = (
    "Summarize the text above in your own words.",
    "Which three things in the text above should a beginner remember, and why?",
    "Explain to a new programmer what the text above is about.",
    "Write a short introduction to the text above.",
)
COPY_REQUEST = "\n\nThe same text once more, word for word:\n\n"
COPY_START = re.compile(r"(?:\s*\S+){1,12}")
LATER_PART = " (later part)"


class TextTokenizer(Protocol):
    """The part of a transformers tokenizer that is used here."""

    def encode(self, text: str, *, add_special_tokens: bool, verbose: bool) -> list[int]: ...
    def decode(self, token_ids: list[int]) -> str: ...
    def apply_chat_template(self, conversation: Any, **options: Any) -> Any: ...


@dataclass(frozen=True)
class Prompt:
    """A prompt as text and as tokens; ``message`` is what a chat client sends as the user."""

    kind: str
    title: str
    text: str
    input_ids: tuple[int, ...]
    message: str | None = None


def real_texts(
    tokenizer: TextTokenizer,
    lengths: Sequence[int],
    seed: int = 0,
    kinds: Iterable[str] = KINDS,
) -> list[Prompt]:
    """One prompt per entry of ``lengths``, the kinds taken in turn, no passage used twice."""
    rng = random.Random(seed)
    shelves = {"code": _Shelf(tokenizer, code(), rng), "prose": _Shelf(tokenizer, prose(), rng)}
    questions = cycle(rng.sample(QUESTIONS, len(QUESTIONS)))
    prompts = []
    for length, kind in zip(lengths, cycle(kinds), strict=False):
        if kind not in KINDS:
            raise ValueError(f"unknown kind of text {kind!r}; known are {', '.join(KINDS)}")
        shelf = shelves["code" if kind == "code" else "prose"]
        frame = _frame(kind, tokenizer, next(questions) if kind == "chat" else "")
        prompts.append(_fill(kind, frame, shelf, tokenizer, length))
    return prompts


def encode(tokenizer: TextTokenizer, text: str) -> list[int]:
    """Token ids of ``text`` with nothing added to it."""
    # verbose=False: the warning about texts longer than the model would be noise here.
    return tokenizer.encode(text, add_special_tokens=False, verbose=False)


def render_chat(tokenizer: TextTokenizer, message: str) -> str:
    """The prompt that a server builds from one user message."""
    return tokenizer.apply_chat_template(
        [{"role": "user", "content": message}], tokenize=False, add_generation_prompt=True
    )


# From a passage: the full prompt and, for chat, the user's message.
Frame = Callable[[str], tuple[str, str | None]]


def _frame(kind: str, tokenizer: TextTokenizer, question: str) -> Frame:
    def plain(passage: str) -> tuple[str, str | None]:
        return passage, None

    def copy(passage: str) -> tuple[str, str | None]:
        # A small model copies reliably once the first words are there.
        start = COPY_START.match(passage)
        return passage + COPY_REQUEST + (start.group() if start else ""), None

    def chat(passage: str) -> tuple[str, str | None]:
        message = f"{passage}\n\n{question}"
        return render_chat(tokenizer, message), message

    return {"copy": copy, "chat": chat}.get(kind, plain)


def _fill(kind: str, frame: Frame, shelf: _Shelf, tokenizer: TextTokenizer, length: int) -> Prompt:
    """Find the passage with which the framed prompt is ``length`` tokens long."""
    title, material = shelf.open(length)
    # The frame repeats words of the passage, so its length may jump with the passage's: steps by
    # the missing tokens, inside a bracket that every try narrows.
    low, high = 0, length + 1
    wanted = length - len(encode(tokenizer, frame("")[0]))
    while low < wanted < high:
        passage = _cut(tokenizer, material, wanted, slack=int(length * TOLERANCE))
        text, message = frame(passage)
        ids = encode(tokenizer, text)
        if abs(len(ids) - length) <= length * TOLERANCE:
            shelf.close(passage)
            return Prompt(kind, title, text, tuple(ids), message)
        if len(ids) < length:
            low = wanted
        else:
            high = wanted
        wanted += length - len(ids)
        if not low < wanted < high:
            wanted = (low + high) // 2
    raise ValueError(f"no {kind} prompt of {length} tokens can be built from '{title}'")


def _cut(tokenizer: TextTokenizer, material: str, wanted: int, slack: int) -> str:
    """A beginning of ``material`` of at most ``wanted`` tokens that ends a line, else a word."""
    ids = encode(tokenizer, material[: wanted * 12])[:wanted]
    hard = tokenizer.decode(ids)
    # Fewer characters than tokens may go, so that the cut stays inside the slack for any tokens.
    earliest = len(tokenizer.decode(ids[: max(wanted - slack // 2, 1)]))
    for end_of in ("\n", " "):
        end = hard.rfind(end_of, earliest)
        if end > 0:
            return hard[:end]
    return hard


class _Shelf:
    """Documents in random order; what has been read of one is not read again."""

    def __init__(
        self, tokenizer: TextTokenizer, documents: Sequence[Document], rng: random.Random
    ) -> None:
        self._tokenizer = tokenizer
        self._left = rng.sample(list(documents), len(documents))
        self._used: list[int] = []

    def open(self, length: int) -> tuple[str, str]:
        """Title and text of at least ``length`` tokens: one document if possible, else several."""
        for i, document in enumerate(self._left):
            if self._holds(document.text, length):
                self._used = [i]
                return document.title, document.text
        self._used, text = [], ""
        for i, document in enumerate(self._left):
            self._used.append(i)
            text += document.text + "\n\n"
            if self._holds(text, length):
                return f"{self._left[0].title}, and more", text
        raise ValueError(f"the installed documents do not suffice for another {length} tokens")

    def close(self, passage: str) -> None:
        """Take the passage, which the last ``open`` gave the material for, off the shelf."""
        taken = [self._left[i] for i in self._used]
        self._left = [d for i, d in enumerate(self._left) if i not in self._used]
        if len(taken) == 1:
            # The next reader starts at a paragraph, and comes only after the untouched documents.
            rest = taken[0].text[len(passage) :].partition("\n\n")[2].lstrip("\n")
            title = taken[0].title.removesuffix(LATER_PART) + LATER_PART
            self._left.append(Document(title, rest))

    def _holds(self, text: str, length: int) -> bool:
        # Text never has more tokens than bytes, so most documents need no counting.
        if len(text) < 2 * length:
            return False
        return len(encode(self._tokenizer, text[: length * 12])) >= length
