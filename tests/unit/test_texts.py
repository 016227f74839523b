"""Prompts cut from the Python installation: length, repeatability, no passage twice."""

from __future__ import annotations

import re
from typing import Any

import pytest

from aspire_sglang.cli.sources import code, prose
from aspire_sglang.cli.texts import COPY_REQUEST, KINDS, TOLERANCE, encode, real_texts


class PieceTokenizer:
    """Words, digits, spaces and signs as tokens: no model is needed to test lengths."""

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}
        self._pieces: list[str] = []

    def encode(self, text: str, **_: Any) -> list[int]:
        ids = []
        for piece in re.findall(r" ?[^\W\d]{1,5}|\d|\s|[^\w\s]|.", text, re.DOTALL):
            if piece not in self._ids:
                self._ids[piece] = len(self._pieces)
                self._pieces.append(piece)
            ids.append(self._ids[piece])
        return ids

    def decode(self, token_ids: list[int]) -> str:
        return "".join(self._pieces[i] for i in token_ids)

    def apply_chat_template(self, conversation: list[dict[str, str]], **_: Any) -> str:
        turns = [f"<{turn['role']}>\n{turn['content']}\n" for turn in conversation]
        return "".join(turns) + "<assistant>\n"


@pytest.fixture(scope="module")
def tokenizer() -> PieceTokenizer:
    return PieceTokenizer()


def test_tokenizer_of_this_test_is_lossless(tokenizer):
    text = "def f(x):\n\treturn x_1 + 2025  # naïve \u2713\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("length", [200, 500, 1500, 3000, 7000])
def test_lengths_are_within_one_percent(tokenizer, length):
    for prompt in real_texts(tokenizer, [length] * len(KINDS)):
        assert len(prompt.input_ids) == pytest.approx(length, rel=TOLERANCE)
        assert list(prompt.input_ids) == encode(tokenizer, prompt.text)


def test_kinds_are_taken_in_turn_and_shaped_as_promised(tokenizer):
    prompts = real_texts(tokenizer, [800] * 8)
    assert [prompt.kind for prompt in prompts] == [*KINDS, *KINDS]
    for prompt in prompts:
        assert (prompt.message is not None) == (prompt.kind == "chat")
        if prompt.kind == "chat":
            assert prompt.message in prompt.text
        if prompt.kind == "copy":
            passage, _, start = prompt.text.partition(COPY_REQUEST)
            assert start
            assert passage.startswith(start)


def test_kinds_can_be_chosen(tokenizer):
    assert [p.kind for p in real_texts(tokenizer, [300] * 3, kinds=["code"])] == ["code"] * 3
    with pytest.raises(ValueError, match="unknown kind of text 'poem'"):
        real_texts(tokenizer, [300], kinds=["poem"])


def test_a_seed_gives_the_same_prompts_and_another_seed_others(tokenizer):
    lengths = [600] * 4
    first = real_texts(tokenizer, lengths, seed=3)
    assert first == real_texts(tokenizer, lengths, seed=3)
    assert first != real_texts(tokenizer, lengths, seed=4)


def test_two_dozen_long_texts_share_no_passage(tokenizer):
    prompts = real_texts(tokenizer, [7500] * 24)
    # Any window of one text would be found in another one if a passage were used twice.
    middles = [prompt.text[len(prompt.text) // 2 :][:200] for prompt in prompts]
    for i, middle in enumerate(middles):
        holders = [j for j, prompt in enumerate(prompts) if middle in prompt.text]
        assert holders == [i]


def test_too_much_is_refused_in_words(tokenizer):
    with pytest.raises(ValueError, match="do not suffice for another 100000000 tokens"):
        real_texts(tokenizer, [100_000_000])
    with pytest.raises(ValueError, match="no chat prompt of 5 tokens can be built"):
        real_texts(tokenizer, [5], kinds=["chat"])


def test_sources_suffice_without_any_installed_package():
    own = sum(len(d.text) for d in prose() if not d.title.startswith("description"))
    assert own > 500_000
    assert sum(len(d.text) for d in code()) > 1_500_000
    titles = [document.title for document in (*prose(), *code())]
    assert len(set(titles)) == len(titles)
