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
    cdf = weights.cumsum(dim=-1, dtype=torch.float64)
    total = cdf[:, -1:].contiguous()
    index = torch.searchsorted(cdf, uniform.double().view(-1, 1) * total, right=True)
    # uniform * total may round up to total: stay on the last index of positive weight.
    index = torch.minimum(index, torch.searchsorted(cdf, total))
    # Parallel scans may differ by an ulp between neighbours, which can point at a zero weight.
    hit = weights.gather(1, index) > 0
    return torch.where(hit, index, weights.argmax(dim=-1, keepdim=True)).view(-1)
