"""Masks at every position of a run, against a matcher led there afresh."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import xgrammar
from llguidance import LLTokenizer, grammar_from
from sglang.srt.constrained.llguidance_backend import GuidanceGrammar
from sglang.srt.constrained.xgrammar_backend import XGrammarGrammar

from aspire_sglang.sampling.grammar import (
    apply_packed_mask,
    ends_run,
    fill_run_masks,
    is_allowed,
)

REGEX = "a[0-9]{2}b?"
LEGAL = [ord(c) for c in "a12b"]


class XGrammar:
    """Tokens 0..255 are bytes, 256 ends the text."""

    vocab, end = 257, 256

    def __call__(self) -> Any:
        words = [bytes([byte]) for byte in range(256)] + ["</s>"]
        info = xgrammar.TokenizerInfo(words, stop_token_ids=[self.end])
        compiled = xgrammar.GrammarCompiler(info).compile_regex(REGEX)
        return XGrammarGrammar(xgrammar.GrammarMatcher(compiled), self.vocab, compiled, None)


class Guidance:
    """llguidance's own byte tokenizer; its last token ends the text."""

    def __init__(self) -> None:
        self.tokenizer = LLTokenizer("byte")
        self.vocab, self.end = self.tokenizer.vocab_size, self.tokenizer.eos_token

    def __call__(self) -> Any:
        return GuidanceGrammar(self.tokenizer, grammar_from("regex", REGEX))


@pytest.fixture(scope="module", params=[XGrammar, Guidance])
def backend(request):
    return request.param()


def masks(backend, rows: int) -> torch.Tensor:
    return torch.full((rows, (backend.vocab + 31) // 32), -1, dtype=torch.int32)


def allowed(backend, mask: torch.Tensor) -> set[int]:
    return {token for token in range(backend.vocab) if is_allowed(mask, token)}


def led(backend, tokens: list[int]) -> set[int]:
    """What may follow ``tokens``, by a new matcher."""
    matcher = backend()
    for token in tokens:
        matcher.accept_token(token)
    mask = masks(backend, 1)
    matcher.fill_vocab_mask(mask, 0)
    return allowed(backend, mask[0])


@pytest.mark.parametrize("committed", [0, 1, 2])
def test_a_verify_row_is_masked_at_every_position(backend, committed):
    matcher = backend()
    for token in LEGAL[:committed]:
        matcher.accept_token(token)
    drafts = LEGAL[committed:]
    mask = masks(backend, len(drafts) + 1)
    # Twice: the first call must leave the matcher where it was.
    for _ in range(2):
        mask.fill_(-1)
        fill_run_masks(matcher, drafts, mask)
        for depth in range(len(drafts) + 1):
            assert allowed(backend, mask[depth]) == led(backend, LEGAL[: committed + depth])


def test_a_draft_row_is_masked_after_all_its_drafts(backend):
    mask = masks(backend, 1)
    fill_run_masks(backend(), LEGAL[:2], mask)
    assert (
        allowed(backend, mask[0]) == led(backend, LEGAL[:2]) == set(range(ord("0"), ord("9") + 1))
    )


def test_rows_behind_an_illegal_draft_do_not_matter_and_harm_nothing(backend):
    matcher = backend()
    mask = masks(backend, 4)
    fill_run_masks(matcher, [LEGAL[0], ord("x"), LEGAL[1]], mask)
    assert allowed(backend, mask[0]) == {ord("a")}
    assert ord("x") not in allowed(backend, mask[1]), "the verify rejects it"
    mask = masks(backend, 5)
    fill_run_masks(matcher, LEGAL, mask)
    assert allowed(backend, mask[4]) == led(backend, LEGAL)


def test_the_end_inside_a_run(backend):
    """Drafts after the end of the text are led nowhere, and the matcher comes back."""
    matcher = backend()
    drafts = [*LEGAL, backend.end, backend.end, ord("a")]
    mask = masks(backend, len(drafts) + 1)
    fill_run_masks(matcher, drafts, mask)
    assert allowed(backend, mask[4]) == {backend.end}
    assert not matcher.is_terminated()
    again = masks(backend, 1)
    fill_run_masks(matcher, [], again)
    assert allowed(backend, again[0]) == {ord("a")}


def test_what_ends_a_run(backend):
    matcher = backend()

    def ends(drafts: list[int]) -> bool:
        return ends_run(matcher, drafts, masks(backend, 1))

    assert not ends(LEGAL[:1])
    assert not ends(LEGAL)
    assert ends([*LEGAL, backend.end]), "the grammar is complete"
    assert ends([*LEGAL[:1], ord("x")]), "an illegal draft"
    assert not ends(LEGAL[:3]), "the matcher came back"


def test_too_many_rows(backend):
    with pytest.raises(ValueError, match="3 masks"):
        fill_run_masks(backend(), LEGAL[:1], masks(backend, 3))


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 100])
def test_packed_masks_on_logits(vocab):
    torch.manual_seed(vocab)
    mask = torch.randint(-(2**31), 2**31, (3, (vocab + 31) // 32)).int()
    logits = torch.randn(3, vocab)
    expected = logits.clone()
    for row in range(3):
        for token in range(vocab):
            if not (int(mask[row, token // 32]) >> (token % 32)) & 1:
                expected[row, token] = -torch.inf
            assert is_allowed(mask[row], token) == (float(expected[row, token]) != -torch.inf)
    apply_packed_mask(logits, mask)
    assert torch.equal(logits, expected)


def test_tokens_without_a_bit_are_forbidden():
    logits = torch.zeros(1, 40)
    apply_packed_mask(logits, torch.full((1, 1), -1, dtype=torch.int32))
    assert torch.isinf(logits).nonzero()[:, 1].tolist() == list(range(32, 40))
    assert not is_allowed(torch.full((1,), -1, dtype=torch.int32), 35)
