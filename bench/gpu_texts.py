"""Requests that differ: prompts of mixed lengths, of texts that are easy and hard to continue."""

from __future__ import annotations

import random
from itertools import cycle, pairwise
from typing import Any

from aspire_sglang.cli.texts import encode, real_texts

KINDS = ("copy", "code", "arithmetic", "continuation", "chat")
"""Taken in turn: a text to repeat, source code, a chain of sums, prose to go on with, and a
question about prose."""

# Documents are used once per so many requests; the next ones shuffle them anew.
CHUNK = 60


def mixed_lengths(count: int, low: int, high: int, seed: int = 5) -> list[int]:
    """``count`` prompt lengths in tokens, spread evenly over the logarithm, in random order."""
    ratio = high / low
    lengths = [round(low * ratio ** ((i + 0.5) / count)) for i in range(count)]
    random.Random(seed).shuffle(lengths)
    return lengths


def mixed_prompts(model: str, lengths: list[int], seed: int = 5) -> list[list[int]]:
    """Token ids of a prompt per length, the kinds taken in turn.

    Raises:
        ValueError: the installed documents do not suffice.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    kinds = [kind for kind, _ in zip(cycle(KINDS), lengths, strict=False)]
    written = [i for i, kind in enumerate(kinds) if kind != "arithmetic"]
    found: dict[int, list[int]] = {}
    for start in range(0, len(written), CHUNK):
        some = written[start : start + CHUNK]
        texts = real_texts(
            tokenizer, [lengths[i] for i in some], seed + start, [kinds[i] for i in some]
        )
        for i, text in zip(some, texts, strict=True):
            # A first line of its own: no two prompts share KV in the prefix cache.
            found[i] = [*encode(tokenizer, f"{i}\n"), *text.input_ids]
    for i in set(range(len(lengths))) - set(written):
        found[i] = sums(tokenizer, lengths[i], seed + i)
    return [found[i] for i in range(len(lengths))]


def sums(tokenizer: Any, length: int, seed: int) -> list[int]:
    """``length`` tokens of a chain of sums, each of which begins with the result before."""
    rng = random.Random(seed)
    value, lines = rng.randrange(10, 100), []
    # A line has at least ten characters, and a token a character here at most.
    for _ in range(length // 4 + 1):
        term = rng.randrange(2, 50)
        sign = "-" if value > 60 and rng.random() < 0.6 else "+"
        result = value - term if sign == "-" else value + term
        lines.append(f"{value} {sign} {term} = {result}\n")
        value = result
    return encode(tokenizer, "".join(lines))[:length]


def shared_tokens(prompts: list[list[int]]) -> int:
    """Tokens that a prefix cache holds once for several of the prompts."""
    shared = 0
    ordered = sorted(prompts)
    for a, b in pairwise(ordered):
        shared += next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), len(a))
    return shared
