"""Accept rules: which drafts of a ragged batch become output, and the token after them.

Layout shared by all rules, for ``n`` requests with at most ``G`` drafts each:

* ``drafts`` ``[n, G]`` int64, padded with -1; ``num_drafts`` ``[n]`` holds ``k_i <= G``;
* target rows are flat: request ``i`` owns rows ``qo_indptr[i] .. qo_indptr[i + 1] - 1``, which are
  ``k_i + 1`` rows; row ``qo_indptr[i] + j`` judges draft ``j`` (0-based), and the last row gives
  the bonus token when all drafts pass. Rows outside these ranges do not influence the result.

Every rule is one batched computation without a device sync.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from aspire_sglang.sampling.drafting import DraftProbs
from aspire_sglang.sampling.draw import draw, uniforms

# Mass of (p - q)+ below which it is float32 rounding noise over a large vocabulary.
_RESIDUAL_NOISE = 1e-7


@dataclass(frozen=True)
class Verified:
    """Outcome of one verify step.

    Attributes:
        tokens: ``[n, G + 1]`` int64: accepted drafts, then one more token, then zeros.
        accept_len: ``[n]`` int64: number of tokens to commit, ``accepted + 1``.
    """

    tokens: Tensor
    accept_len: Tensor


def verify_greedy(
    target_tokens: Tensor, drafts: Tensor, num_drafts: Tensor, qo_indptr: Tensor
) -> Verified:
    """Accept the longest prefix of drafts that equal the target's token, then add the target's own.

    With ``target_tokens = argmax(logits)`` this is greedy decoding. It is exact for *any* rule
    that fixes the target's token at a row without looking at the draft.

    Args:
        target_tokens: ``[T]`` int.
        drafts, num_drafts, qo_indptr: see the module's layout.

    Raises:
        ValueError: if the shapes do not fit.
    """
    _check(drafts, num_drafts, qo_indptr)
    width = drafts.shape[1] + 1
    flat = qo_indptr[:-1].view(-1, 1) + torch.arange(width, device=drafts.device)
    # Short requests would read rows of the next one (masked below) or past the end (clamped).
    target = target_tokens.long()[flat.clamp(max=max(target_tokens.shape[0] - 1, 0))]
    accepted = _leading(target[:, :-1] == drafts, num_drafts)
    kept = torch.arange(width, device=drafts.device) <= accepted.view(-1, 1)
    return Verified(target * kept, accepted + 1)


def verify_coupled(
    target_samples: Tensor, drafts: Tensor, num_drafts: Tensor, qo_indptr: Tensor
) -> Verified:
    """Accept while the draft equals the target's own sample at the same noise.

    The target's sample at a position is a function of its distribution and of noise keyed by
    (seed, position), so it is what plain decoding with that noise would emit; the draft only
    guesses it, and needs no stored distribution. See :mod:`aspire_sglang.sampling.coupling`.

    Args:
        target_samples: ``[T]`` int, drawn with ``sample_coupled`` at each flat row.
        drafts, num_drafts, qo_indptr: see the module's layout.
    """
    return verify_greedy(target_samples, drafts, num_drafts, qo_indptr)


def verify_rejection(
    target_probs: Tensor,
    draft_probs: DraftProbs | None,
    drafts: Tensor,
    num_drafts: Tensor,
    qo_indptr: Tensor,
    uniform: Tensor | None = None,
    generator: torch.Generator | None = None,
    point_mass: Tensor | None = None,
) -> Verified:
    """Speculative sampling (Leviathan et al. 2023, algorithm 1; Chen et al. 2023, algorithm 2).

    Draft ``d`` is accepted with probability ``min(1, p(d) / q(d))``. At the first rejection the
    token comes from the normalised ``(p - q)+``; if all pass, the bonus comes from the last row.
    A full row of ``q`` is read only at the rejected position.

    Args:
        target_probs: ``[T, V]`` float32, normalised, after all filters.
        draft_probs: the distributions the drafts were drawn from; None if every draft was chosen
            without randomness.
        drafts, num_drafts, qo_indptr: see the module's layout.
        uniform: ``[n, G + 1]`` in [0, 1), best float64: column ``j`` judges draft ``j``, the last
            column draws the final token. Drawn from ``generator`` if not given.
        generator: source of the uniforms.
        point_mass: ``[n]`` bool: drafts of these requests were chosen without randomness, so ``q``
            is 1 at the draft and ``draft_probs`` is not used.

    Returns:
        The outcome; no token with ``p = 0`` is ever emitted.

    Raises:
        ValueError: if the shapes do not fit.
    """
    _check(drafts, num_drafts, qo_indptr)
    n, depth = drafts.shape
    if uniform is None:
        uniform = uniforms((n, depth + 1), drafts.device, generator)
    elif uniform.shape != (n, depth + 1):
        raise ValueError(f"uniforms are {tuple(uniform.shape)}, not {(n, depth + 1)}")
    first = qo_indptr[:-1].long()
    last_row = max(target_probs.shape[0] - 1, 0)
    token = drafts.clamp(min=0)
    steps = torch.arange(depth, device=drafts.device)
    p_token = target_probs[(first.view(-1, 1) + steps).clamp(max=last_row), token]
    q_token = torch.ones_like(p_token)
    if draft_probs is not None:
        rows = draft_probs.rows.clamp(0, max(draft_probs.stored.shape[0] - 1, 0))
        drawn = draft_probs.token_probs
        if drawn is None:
            drawn = _token_probs(draft_probs.stored, rows, token)
        q_token = drawn if point_mass is None else torch.where(point_mass.view(-1, 1), 1.0, drawn)
    # Strict: with u = 0 a token of p = 0 must still be rejected.
    accepted = _leading(uniform[:, :depth] * q_token < p_token, num_drafts)

    p = target_probs[(first + accepted).clamp(max=last_row)]
    weights = p
    if depth:
        rejected = accepted < num_drafts
        at = accepted.clamp(max=depth - 1).view(-1, 1)
        from_pool = torch.zeros_like(rejected)
        if draft_probs is not None and draft_probs.stored.shape[0]:
            from_pool = rejected if point_mass is None else rejected & ~point_mass
            q = draft_probs.stored[rows.gather(1, at).view(-1)].float()
            # Pool rows of other requests may hold anything, NaN included: mask, do not scale.
            q = torch.where(from_pool.view(-1, 1), q / q.sum(dim=-1, keepdim=True), 0.0)
            weights = (p - q).clamp(min=0)
        # A point mass leaves p without the draft itself.
        gone = (rejected & ~from_pool).view(-1, 1)
        at_token = token.gather(1, at)
        rest = weights.gather(1, at_token).masked_fill(gone, 0.0)
        weights = weights.scatter(1, at_token, rest)
        empty = weights.sum(dim=-1, keepdim=True) <= _RESIDUAL_NOISE
        weights = torch.where(empty, p, weights)
    final = draw(weights, uniform[:, depth])

    columns = torch.arange(depth + 1, device=drafts.device)
    tokens = torch.nn.functional.pad(token, (0, 1)) * (columns < accepted.view(-1, 1))
    return Verified(tokens.scatter(1, accepted.view(-1, 1), final.view(-1, 1)), accepted + 1)


def _leading(passed: Tensor, num_drafts: Tensor) -> Tensor:
    """Number of drafts before the first failure, ``[n]`` int64."""
    valid = torch.arange(passed.shape[1], device=passed.device) < num_drafts.view(-1, 1)
    return (passed & valid).long().cumprod(dim=1).sum(dim=1)


def _token_probs(stored: Tensor, rows: Tensor, token: Tensor) -> Tensor:
    if not stored.shape[0]:
        return torch.ones_like(token, dtype=torch.float32)
    return stored[rows, token].float() / stored.float().sum(dim=-1)[rows]


def _check(drafts: Tensor, num_drafts: Tensor, qo_indptr: Tensor) -> None:
    n = drafts.shape[0]
    if drafts.dim() != 2 or num_drafts.shape != (n,) or qo_indptr.shape != (n + 1,):
        raise ValueError(
            f"drafts {tuple(drafts.shape)}, num_drafts {tuple(num_drafts.shape)} and qo_indptr "
            f"{tuple(qo_indptr.shape)} do not describe one batch [n, G], [n], [n + 1]"
        )
