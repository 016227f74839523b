"""Draft tokens and the probabilities they were really drawn with.

Rejection sampling (Leviathan et al. 2023, Chen et al. 2023) is exact only if the ``q`` in
``min(1, p / q)`` and in ``(p - q)+`` is the distribution the draft was drawn from. ``q`` is kept
in 16 bits to save memory, so the draft is drawn *after* rounding: the true distribution is then
``stored / sum(stored)`` and nothing is lost, whatever the rounding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from aspire_sglang.sampling.draw import draw, uniforms


@dataclass(frozen=True)
class DraftSample:
    """One drawn draft token per row.

    Attributes:
        tokens: ``[n]`` int64.
        stored: ``[n, V]`` in the storage dtype; *not* normalised.
        token_probs: ``[n]`` float32, ``stored[token] / sum(stored)``: the probability with which
            the token was drawn. Also the draft's confidence in it.
    """

    tokens: Tensor
    stored: Tensor
    token_probs: Tensor


@dataclass(frozen=True)
class DraftProbs:
    """Where the draft distributions of a batch lie; nothing of size ``V`` is copied to build it.

    Attributes:
        stored: ``[R, V]`` float: a pool of rows such as ``slots * G`` preallocated ones, or the
            flat ``sum(k)`` rows of this batch. Row ``r`` stands for ``stored[r] / sum(stored[r])``.
        rows: ``[n, G]`` int64: row of ``stored`` for draft ``j`` of request ``i``. Padding may hold
            any value.
        token_probs: ``[n, G]`` float: ``DraftSample.token_probs`` of the drafts. If None they are
            computed from ``stored``, which reads all its rows again.
    """

    stored: Tensor
    rows: Tensor
    token_probs: Tensor | None = None

    def take(self, index: Tensor) -> DraftProbs:
        """The requests at ``index`` (``[m]`` int64)."""
        probs = None if self.token_probs is None else self.token_probs[index]
        return DraftProbs(self.stored, self.rows[index], probs)


def flat_draft_rows(num_drafts: Tensor, width: int) -> Tensor:
    """``DraftProbs.rows`` for distributions stored back to back, request after request.

    Args:
        num_drafts: ``[n]`` int.
        width: ``G``.

    Returns:
        ``[n, G]`` int64; entries beyond ``num_drafts`` are meaningless.
    """
    first = torch.cumsum(num_drafts, 0) - num_drafts
    return first.view(-1, 1) + torch.arange(width, device=num_drafts.device)


def sample_draft(
    probs: Tensor,
    uniform: Tensor | None = None,
    generator: torch.Generator | None = None,
    store_dtype: torch.dtype = torch.bfloat16,
) -> DraftSample:
    """Round the draft distribution to its storage type, then draw from exactly what is stored.

    Args:
        probs: ``[n, V]`` float, the draft's distribution after the same chain as the target's
            (:func:`aspire_sglang.sampling.processors.target_probs`).
        uniform: ``[n]`` in [0, 1); drawn from ``generator`` if not given.
        generator: source of the uniforms.
        store_dtype: type ``q`` is kept in. bfloat16 keeps the exponent range of float32, so small
            probabilities lose digits but do not vanish.
    """
    stored = probs.to(store_dtype)
    weights = stored.float()
    if uniform is None:
        uniform = uniforms((probs.shape[0],), probs.device, generator)
    tokens = draw(weights, uniform)
    chosen = weights.gather(1, tokens.view(-1, 1)).view(-1)
    return DraftSample(tokens, stored, chosen / weights.sum(dim=-1))
