"""Noise keyed by (seed, position), so that draft and target can sample with the same dice.

A sample is ``argmax(log p + g)`` with Gumbel noise ``g``, one value per token of the vocabulary
(Gumbel-max trick). Draft and target use the same ``g`` at the same position: where their
distributions are close they mostly pick the same token, and the output is the target's sample, so
the text for a seed does not depend on what was drafted.

The hash is the MurmurHash3 of SGLang's seeded sampler (``multinomial_with_seed``), in plain tensor
operations, with the same key: a request that carries a seed and no top-k, top-p or min-p gets the
text of SGLang's deterministic plain decoding, up to near-ties. With those filters anywhere in the
batch SGLang keys the noise by rank instead of by token; ranks differ between draft and target, and
a batch's neighbours should not change a text, so here it stays by token.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF


def gumbel_noise(seed: Tensor, position: Tensor, vocab: int) -> Tensor:
    """Counter-based Gumbel(0, 1) noise.

    Args:
        seed: ``[n]`` int64.
        position: ``[n]`` int, position of the query token whose logits are sampled (the last token
            of the text so far), as plain decoding counts it.
        vocab: size of the vocabulary.

    Returns:
        ``[n, vocab]`` float64, finite. Equal keys give equal rows, on every device.
    """
    seed = seed.long()
    row = torch.zeros_like(seed)
    for block in (seed & _MASK, (seed >> 32) & _MASK, position.long() & _MASK):
        row = _absorb(row, _scramble(block))
    h = _absorb(row.view(-1, 1), _columns(vocab, seed.device))
    h ^= 16  # bytes hashed
    # MurmurHash3's finaliser, in place: these are vocabulary-sized.
    h ^= h >> 16
    h.mul_(0x85EBCA6B).bitwise_and_(_MASK)
    h ^= h >> 13
    h.mul_(0xC2B2AE35).bitwise_and_(_MASK)
    h ^= h >> 16
    x = h.double().div_(_MASK)
    # x = 0 and x = 1 would give infinite noise, which could even pick a token of probability 0.
    x.clamp_(min=2.0**-33, max=1.0 - 2.0**-33)
    return x.log_().neg_().log_().neg_()


def sample_coupled(probs: Tensor, noise: Tensor) -> Tensor:
    """Gumbel-max sample.

    Args:
        probs: ``[n, V]`` float, non-negative; need not be normalised.
        noise: ``[n, V]`` float64 from :func:`gumbel_noise`.

    Returns:
        ``[n]`` int64, distributed as ``probs`` over seeds; never a token of probability 0.
    """
    return (probs.log() + noise).argmax(dim=-1)


def draw_coupled(probs: Tensor, seed: Tensor, position: Tensor) -> Tensor:
    """:func:`sample_coupled` with the noise of each row's key.

    Args:
        probs: ``[n, V]`` float, non-negative; need not be normalised.
        seed, position: ``[n]``, see :func:`gumbel_noise`.

    Returns:
        ``[n]`` int64.
    """
    vocab = probs.shape[1]
    if probs.device.type != "cpu" or probs.shape[0] < 2:
        return sample_coupled(probs, gumbel_noise(seed, position, vocab))
    # One row of noise stays in the cache; several at once cost twice as much per row.
    rows = (slice(i, i + 1) for i in range(probs.shape[0]))
    return torch.cat(
        [sample_coupled(probs[i], gumbel_noise(seed[i], position[i], vocab)) for i in rows]
    )


@lru_cache(maxsize=4)
def _columns(vocab: int, device: torch.device) -> Tensor:
    return _scramble(torch.arange(vocab, device=device))


def _scramble(block: Tensor) -> Tensor:
    block = (block * 0xCC9E2D51) & _MASK
    block = ((block << 15) | (block >> 17)) & _MASK
    return (block * 0x1B873593) & _MASK


def _absorb(state: Tensor, block: Tensor) -> Tensor:
    state = state ^ block
    rotated = (state << 13) & _MASK
    rotated |= state >> 19
    return rotated.mul_(5).add_(0xE6546B64).bitwise_and_(_MASK)
