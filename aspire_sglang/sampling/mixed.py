"""One verify call for a batch in which requests use different accept rules.

Greedy requests match the argmax, coupled requests match the target's own sample, all others use
rejection sampling. Only the last two need probabilities over the vocabulary, so each rule is
computed on its own rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from aspire_sglang.sampling.coupling import draw_coupled
from aspire_sglang.sampling.drafting import DraftProbs
from aspire_sglang.sampling.draw import uniforms
from aspire_sglang.sampling.processors import SamplingRows, target_probs
from aspire_sglang.sampling.verification import Verified, verify_greedy, verify_rejection


@dataclass(frozen=True)
class Coupling:
    """Requests that sample with noise keyed by (seed, position).

    Attributes:
        mask: ``[n]`` bool: the requests; greedy ones stay greedy.
        seed: ``[n]`` int64, read where ``mask``.
        positions: ``[T]`` int: position of the query token of each flat row.
    """

    mask: Tensor
    seed: Tensor
    positions: Tensor


def verify(
    logits: Tensor,
    rows: SamplingRows,
    drafts: Tensor,
    num_drafts: Tensor,
    qo_indptr: Tensor,
    draft_probs: DraftProbs | None = None,
    uniform: Tensor | None = None,
    generator: torch.Generator | None = None,
    point_mass: Tensor | None = None,
    coupling: Coupling | None = None,
) -> Verified:
    """Verify a ragged batch losslessly, each request by its own rule.

    Args:
        logits: ``[T, V]`` target logits after penalties, bias and grammar masks; not modified.
        rows: ``n`` sampling rows, one per request.
        drafts, num_drafts, qo_indptr: layout of :mod:`aspire_sglang.sampling.verification`.
        draft_probs: distributions of the drafts; rows of greedy and coupled requests are not read.
            None if every draft was chosen without randomness.
        uniform: ``[n, G + 1]`` in [0, 1), or None to draw them from ``generator``. Equal uniforms
            give equal results, whatever else is in the batch.
        generator: source of the uniforms.
        point_mass: ``[n]`` bool: sampled requests whose drafts were chosen without randomness.
        coupling: the coupled requests, if any.

    Returns:
        Tokens and accept lengths, ``n`` of each.

    Raises:
        ValueError: if the shapes do not fit.
    """
    n, depth = drafts.shape
    if len(rows) != n:
        raise ValueError(f"{len(rows)} sampling rows for {n} requests")
    if not rows.has_sampled or n == 0:
        return verify_greedy(logits.argmax(dim=-1), drafts, num_drafts, qo_indptr)
    if uniform is None:
        # For the whole batch before any split: a request's dice do not depend on its neighbours.
        uniform = uniforms((n, depth + 1), drafts.device, generator)
    flat = torch.arange(logits.shape[0], device=logits.device)
    owner = torch.searchsorted(qo_indptr[1:].contiguous(), flat, right=True).clamp(max=n - 1)
    exact = rows.greedy if coupling is None else rows.greedy | coupling.mask
    if not bool(exact.any()):
        return verify_rejection(
            target_probs(logits, rows.take(owner)),
            draft_probs,
            drafts,
            num_drafts,
            qo_indptr,
            uniform=uniform,
            point_mass=point_mass,
        )

    owned = (flat >= qo_indptr[0]) & (flat < qo_indptr[-1])
    targets = torch.zeros(logits.shape[0], dtype=torch.int64, device=logits.device)
    at = (owned & rows.greedy[owner]).nonzero().view(-1)
    targets[at] = logits[at].argmax(dim=-1)
    if coupling is not None:
        at = (owned & (coupling.mask & ~rows.greedy)[owner]).nonzero().view(-1)
        probs = target_probs(logits[at], rows.take(owner[at]))
        targets[at] = draw_coupled(probs, coupling.seed[owner[at]], coupling.positions[at])
    result = verify_greedy(targets, drafts, num_drafts, qo_indptr)
    index = (~exact).nonzero().view(-1)
    if index.numel() == 0:
        return result
    at = (owned & ~exact[owner]).nonzero().view(-1)
    sampled = verify_rejection(
        target_probs(logits[at], rows.take(owner[at])),
        None if draft_probs is None else draft_probs.take(index),
        drafts[index],
        num_drafts[index],
        torch.nn.functional.pad((num_drafts[index] + 1).cumsum(0), (1, 0)),
        uniform=uniform[index],
        point_mass=None if point_mass is None else point_mass[index],
    )
    result.tokens[index] = sampled.tokens
    result.accept_len[index] = sampled.accept_len
    return result
