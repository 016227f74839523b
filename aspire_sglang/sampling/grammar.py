"""Vocabulary masks of a grammar for every position of a run.

A matcher stands after the committed output. For the positions after pending drafts it is led
through the drafts and back again, so nothing of a run that may be rejected stays in it.

Masks are packed as xgrammar and llguidance pack them: bit ``t % 32`` of the int32 at ``t // 32`` is
set where token ``t`` is allowed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

_BITS = (1, 2, 4, 8, 16, 32, 64, 128)


class Matcher(Protocol):
    """What this module needs of a grammar's state."""

    def accept_token(self, token: int) -> None: ...

    def rollback(self, count: int) -> None: ...

    def is_terminated(self) -> bool: ...

    def fill_vocab_mask(self, mask: Tensor, row: int) -> None: ...


def fill_run_masks(matcher: Matcher, drafts: Sequence[int], mask: Tensor) -> None:
    """Fill the masks of consecutive positions of one request.

    Args:
        matcher: the grammar after the committed output; its state is the same afterwards.
        drafts: pending drafts; those before the first position must be legal.
        mask: ``[m, ceil(V / 32)]`` int32, all bits set. The last row is the position after all
            drafts. Rows behind an illegal draft or behind the end of the grammar stay as they are:
            no such position is ever output.

    Raises:
        ValueError: there are more rows than positions.
    """
    before = len(drafts) + 1 - mask.shape[0]
    if before < 0:
        raise ValueError(f"{mask.shape[0]} masks do not fit {len(drafts)} drafts")
    accepted = 0
    try:
        for depth in range(len(drafts) + 1):
            if matcher.is_terminated():
                break
            row = depth - before
            if row >= 0:
                matcher.fill_vocab_mask(mask, row)
            if depth == len(drafts) or (row >= 0 and not is_allowed(mask[row], drafts[depth])):
                break
            matcher.accept_token(drafts[depth])
            accepted += 1
    finally:
        if accepted:
            matcher.rollback(accepted)


def ends_run(matcher: Matcher, drafts: Sequence[int], scratch: Tensor) -> bool:
    """Whether nothing may follow the last draft: it is illegal, or it ended the grammar.

    Args:
        matcher, drafts: see :func:`fill_run_masks`; all drafts but the last must be legal.
        scratch: ``[1, ceil(V / 32)]`` int32, all bits set; overwritten.
    """
    fill_run_masks(matcher, drafts[:-1], scratch)
    if not is_allowed(scratch[0], drafts[-1]):
        return True
    for token in drafts:
        matcher.accept_token(token)
    ended = matcher.is_terminated()
    matcher.rollback(len(drafts))
    return ended


def is_allowed(mask: Tensor, token: int) -> bool:
    """Whether a packed mask ``[ceil(V / 32)]`` allows a token."""
    return token // 32 < mask.shape[0] and bool(int(mask[token // 32]) >> (token % 32) & 1)


def apply_packed_mask(logits: Tensor, mask: Tensor) -> None:
    """Forbid what the masks do not allow, in place.

    Args:
        logits: ``[m, V]`` float.
        mask: ``[m, W]`` int32; tokens beyond its ``32 * W`` bits are forbidden.
    """
    rows, vocab = logits.shape
    bits = torch.tensor(_BITS, dtype=torch.uint8, device=mask.device)
    # Bytes of an int32 in memory order, which is the order of the tokens on little-endian machines.
    allowed = (mask.contiguous().view(torch.uint8).unsqueeze(-1) & bits).view(rows, -1)
    known = min(vocab, allowed.shape[1])
    logits[:, :known].masked_fill_(allowed[:, :known] == 0, -torch.inf)
    logits[:, known:] = -torch.inf
