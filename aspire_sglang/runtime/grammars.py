"""Structured output: SGLang's grammar objects at every position of a mixed step.

SGLang moves a request's grammar over the tokens a step committed (``advance_grammar_fsm``) and cuts
the run where the grammar ends. Here it supplies the masks in between, for drafts and verifies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from sglang.srt.constrained.base_grammar_backend import BaseGrammarObject, GrammarMask
from sglang.srt.constrained.reasoner_grammar_backend import ReasonerGrammarObject

from aspire_sglang.sampling.grammar import apply_packed_mask, ends_run, fill_run_masks


def mask_logits(req: Any, drafts: Sequence[int], logits: torch.Tensor) -> None:
    """Forbid what the request's grammar does not allow, in place.

    Args:
        req: SGLang's ``Req`` with a grammar.
        drafts: its pending drafts.
        logits: ``[m, V]``, the request's last ``m`` positions.
    """
    grammar = req.grammar
    if grammar.finished or grammar.is_terminated():
        return
    mask = grammar.allocate_vocab_mask(
        vocab_size=logits.shape[1], batch_size=logits.shape[0], device=logits.device
    )
    fill_run_masks(grammar, drafts, mask)
    GrammarMask(grammar, grammar.move_vocab_mask(mask, logits.device)).apply(logits)


def run_is_complete(req: Any, drafts: Sequence[int], vocab: int) -> bool:
    """Whether the request's grammar allows no further draft, so that it has to verify now."""
    grammar = req.grammar
    if not drafts:
        return not _can_look_ahead(grammar)
    scratch = grammar.allocate_vocab_mask(vocab_size=vocab, batch_size=1, device="cpu")
    return ends_run(grammar, drafts, scratch)


def _can_look_ahead(grammar: Any) -> bool:
    """Whether the grammar can be led through drafts and back; SGLang's outlines backend cannot."""
    if isinstance(grammar, ReasonerGrammarObject):
        return grammar.grammar is None or _can_look_ahead(grammar.grammar)
    return type(grammar).rollback is not BaseGrammarObject.rollback


def apply_mask(original: Callable[..., None], mask: GrammarMask, logits: torch.Tensor) -> None:
    """AROUND ``GrammarMask.apply``: xgrammar's and llguidance's packed masks on a CPU."""
    if mask.vocab_mask.dtype != torch.int32:
        return original(mask, logits)
    return apply_packed_mask(logits, mask.vocab_mask)
