"""Drawing one token per row from given uniforms: inverse transform sampling.

The uniforms are explicit so that every tensor-parallel rank can use the same ones, and one
uniform per row with a cumulative sum is several times cheaper on a CPU than one exponential per
vocabulary entry (what ``torch.multinomial`` does).
"""

from __future__ import annotations

import torch
from torch import Tensor


def uniforms(
    shape: tuple[int, ...],
    device: torch.device | str = "cpu",
    generator: torch.Generator | None = None,
) -> Tensor:
    """Uniforms in [0, 1), float64: float32 would leave rare tokens of a large vocabulary out."""
    return torch.rand(shape, dtype=torch.float64, device=device, generator=generator)


def draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """Sample one index per row in proportion to the weights.

    Args:
        weights: ``[n, V]`` float, non-negative, each row with a positive sum; need not be
            normalised.
        uniform: ``[n]`` float in [0, 1).

    Returns:
        ``[n]`` int64. An index of weight 0 is never returned.
    """
    if weights.is_cuda:
        return draw_by_blocks(weights, uniform)
    cdf = weights.cumsum(dim=-1, dtype=torch.float64)
    total = cdf[:, -1:].contiguous()
    index = torch.searchsorted(cdf, uniform.double().view(-1, 1) * total, right=True)
    # uniform * total may round up to total: stay on the last index of positive weight.
    index = torch.minimum(index, torch.searchsorted(cdf, total))
    # Parallel scans may differ by an ulp between neighbours, which can point at a zero weight.
    hit = weights.gather(1, index) > 0
    return torch.where(hit, index, weights.argmax(dim=-1, keepdim=True)).view(-1)


def draw_by_blocks(weights: Tensor, uniform: Tensor, block: int = 256) -> Tensor:
    """:func:`draw` in two stages, first a block of the vocabulary, then a token in it.

    A running sum over a whole vocabulary is slow on a GPU: it is sequential in each row. Sums of
    blocks are not, and what is left to scan is short.

    Args:
        weights, uniform: as in :func:`draw`.
        block: entries per block.
    """
    rows, vocab = weights.shape
    blocks = torch.nn.functional.pad(weights, (0, -vocab % block)).view(rows, -1, block)
    mass = blocks.sum(dim=-1, dtype=torch.float64)
    cdf = mass.cumsum(dim=-1)
    total = cdf[:, -1:].contiguous()
    target = uniform.double().view(-1, 1) * total
    chosen = torch.searchsorted(cdf, target, right=True)
    # As in draw: stay on the last block of positive weight.
    chosen = torch.minimum(chosen, torch.searchsorted(cdf, total))
    rest = target - (cdf.gather(1, chosen) - mass.gather(1, chosen))
    inside = blocks.gather(1, chosen.view(-1, 1, 1).expand(-1, 1, block)).squeeze(1)
    cdf = inside.cumsum(dim=-1, dtype=torch.float64)
    index = torch.searchsorted(cdf, rest, right=True)
    index = torch.minimum(index, torch.searchsorted(cdf, cdf[:, -1:].contiguous()))
    index = (chosen * block + index).clamp(max=vocab - 1)
    hit = weights.gather(1, index) > 0
    return torch.where(hit, index, weights.argmax(dim=-1, keepdim=True)).view(-1)


def race(weights: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Sample one index per row in proportion to the weights, with a random number per entry.

    Each entry runs for an exponential time divided by its weight, and the first one home wins. On
    a GPU these are three kernels, where :func:`draw` takes twenty.

    Args:
        weights: as in :func:`draw`.
        generator: source of the random numbers.

    Returns:
        ``[n]`` int64. An index of weight 0 is never returned.
    """
    # In float32 no time is shorter than 6e-8, and an entry of a smaller share would never win.
    times = torch.empty(weights.shape, dtype=torch.float64, device=weights.device)
    times.exponential_(generator=generator)
    # A time of 0 would let an entry of weight 0 win as NaN.
    times.clamp_(min=1e-30)
    return (weights / times).argmax(dim=-1)
