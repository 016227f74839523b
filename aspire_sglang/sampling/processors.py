"""The probability chain of plain decoding: temperature, softmax, top-k, top-p, min-p.

Speculation is lossless only if the verifier's target distribution is the one plain decoding
samples from, so this module follows SGLang's ``pytorch`` sampling backend
(``layers/sampler.py``, ``top_k_top_p_min_p_sampling_from_probs_torch``) step by step:

1. ``p = softmax(logits / temperature)``, once, before any filter;
2. sort descending; drop rank ``>= top_k``;
3. drop a token if the mass *before* it, taken from the unfiltered ``p``, exceeds ``top_p``;
4. drop ``p < min_p * max(p)``;
5. renormalise what is left.

Top-k does not rescale before top-p: "top-k, renormalise, top-p" gives another nucleus.
Penalties, logit bias and grammar masks act on the logits and come before this module.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

GREEDY_TEMPERATURE = 1e-6
"""Below this temperature a request is greedy (SGLang's ``_SAMPLING_EPS``)."""

TOP_K_ALL = 1 << 30
"""``top_k`` of a request that keeps the whole vocabulary; ``-1`` is accepted as the same."""

# Sorting a vocabulary costs ~20x a partial selection on a CPU, and filters rarely keep more
# tokens than this; rows that do are sorted in full.
_MAX_CANDIDATES = 1024


@dataclass(frozen=True)
class SamplingRows:
    """Sampling parameters, one entry per row of a batch.

    Attributes:
        temperature: ``[n]`` float, ignored where ``greedy``.
        top_k: ``[n]`` int, ``TOP_K_ALL`` where unused, at least 1.
        top_p: ``[n]`` float in [0, 1].
        min_p: ``[n]`` float in [0, 1].
        greedy: ``[n]`` bool.
        has_greedy, has_sampled, has_rank_filter, has_min_p: host knowledge about the rows, so that
            no device sync is needed to skip work. True means "maybe", False means "certainly not".
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    greedy: Tensor
    has_greedy: bool = True
    has_sampled: bool = True
    has_rank_filter: bool = True
    has_min_p: bool = True

    def __post_init__(self) -> None:
        shapes = {tuple(t.shape) for t in self._tensors().values()}
        if len(shapes) != 1 or len(next(iter(shapes))) != 1:
            raise ValueError(f"sampling rows need five tensors of one shape [n], got {shapes}")

    @classmethod
    def of_batch(cls, info: Any, device: torch.device | str) -> SamplingRows:
        """Rows of a batch of requests.

        Args:
            info: anything with ``temperatures``, ``top_ks``, ``top_ps`` and ``min_ps`` per request.
        """
        return cls.build(info.temperatures, info.top_ks, info.top_ps, info.min_ps, device=device)

    @classmethod
    def build(
        cls,
        temperature: Sequence[float] | Tensor,
        top_k: Sequence[int] | Tensor,
        top_p: Sequence[float] | Tensor,
        min_p: Sequence[float] | Tensor,
        device: torch.device | str = "cpu",
    ) -> SamplingRows:
        """Make rows from request parameters, with exact host flags.

        A row is greedy if its temperature is (almost) 0 or its ``top_k`` is 1. Pass host data:
        the flags are read from the values, so device tensors cost one sync.

        Args:
            temperature, top_k, top_p, min_p: ``n`` values each, ``[n]`` or ``[n, 1]``.
            device: where the rows live.

        Raises:
            ValueError: if the lengths differ or a value is out of its range.
        """
        temp = torch.as_tensor(temperature, dtype=torch.float32).reshape(-1).cpu()
        ks = torch.as_tensor(top_k, dtype=torch.int64).reshape(-1).cpu()
        ps = torch.as_tensor(top_p, dtype=torch.float32).reshape(-1).cpu()
        mins = torch.as_tensor(min_p, dtype=torch.float32).reshape(-1).cpu()
        ks = torch.where(ks == -1, TOP_K_ALL, ks)
        for name, values, ok in (
            ("temperature", temp, (temp >= 0) & temp.isfinite()),
            ("top_k", ks, ks >= 1),
            ("top_p", ps, (ps >= 0) & (ps <= 1)),
            ("min_p", mins, (mins >= 0) & (mins <= 1)),
        ):
            if not bool(ok.all()):
                raise ValueError(f"{name} out of range: {values[~ok].tolist()}")
        greedy = (temp < GREEDY_TEMPERATURE) | (ks == 1)
        sampled = ~greedy
        return cls(
            temp.to(device),
            ks.to(device),
            ps.to(device),
            mins.to(device),
            greedy.to(device),
            has_greedy=bool(greedy.any()),
            has_sampled=bool(sampled.any()),
            has_rank_filter=bool((((ks != TOP_K_ALL) | (ps < 1)) & sampled).any()),
            has_min_p=bool(((mins > 0) & sampled).any()),
        )

    def __len__(self) -> int:
        return self.temperature.shape[0]

    def take(self, index: Tensor) -> SamplingRows:
        """Rows at ``index`` (``[m]`` int64, or a ``[n]`` bool mask), in that order."""
        return self._map(lambda t: t[index])

    def expand(self, counts: Tensor, total: int | None = None) -> SamplingRows:
        """Repeat row ``i`` ``counts[i]`` times.

        Args:
            counts: ``[n]`` int.
            total: ``sum(counts)`` if the host knows it; saves a device sync.
        """
        return self._map(lambda t: torch.repeat_interleave(t, counts, output_size=total))

    def _tensors(self) -> dict[str, Tensor]:
        return {f.name: getattr(self, f.name) for f in fields(self) if f.default is not True}

    def _map(self, fn) -> SamplingRows:
        # A selection of rows can lose a property but not gain one: the flags stay valid.
        return SamplingRows(
            **{name: fn(tensor) for name, tensor in self._tensors().items()},
            has_greedy=self.has_greedy,
            has_sampled=self.has_sampled,
            has_rank_filter=self.has_rank_filter,
            has_min_p=self.has_min_p,
        )


def target_probs(logits: Tensor, rows: SamplingRows) -> Tensor:
    """The distribution plain decoding samples from, one row per query token.

    Args:
        logits: ``[T, V]`` float of any precision; not modified.
        rows: ``T`` sampling rows.

    Returns:
        ``[T, V]`` float32, every row sums to 1 and is exactly 0 outside the filters.
        Greedy rows are one-hot at the argmax.

    Raises:
        ValueError: if ``logits`` and ``rows`` differ in length.
    """
    if logits.dim() != 2 or logits.shape[0] != len(rows):
        raise ValueError(f"logits {tuple(logits.shape)} do not fit {len(rows)} sampling rows")
    if not rows.has_sampled:
        return _one_hot(logits)
    if not rows.has_greedy:
        return _sampled_probs(logits, rows)
    if logits.device.type == "cpu":
        sampled = (~rows.greedy).nonzero().view(-1)
        if sampled.numel() == len(rows):
            return _sampled_probs(logits, rows)
        probs = _one_hot(logits)
        if sampled.numel():
            probs[sampled] = _sampled_probs(logits[sampled], rows.take(sampled))
        return probs
    # Selecting rows would wait for the device; computing all of them does not.
    return torch.where(rows.greedy.view(-1, 1), _one_hot(logits), _sampled_probs(logits, rows))


def _one_hot(logits: Tensor) -> Tensor:
    probs = torch.zeros(logits.shape, dtype=torch.float32, device=logits.device)
    if logits.shape[0]:
        probs.scatter_(1, logits.argmax(dim=-1, keepdim=True), 1.0)
    return probs


def _sampled_probs(logits: Tensor, rows: SamplingRows) -> Tensor:
    # Greedy rows may carry temperature 0; their result is thrown away.
    temperature = torch.where(rows.greedy, 1.0, rows.temperature).view(-1, 1)
    return filter_probs(torch.softmax(logits.float() / temperature, dim=-1), rows)


def filter_probs(probs: Tensor, rows: SamplingRows) -> Tensor:
    """Steps 2 to 5 of the chain, for probabilities that already have their temperature.

    Args:
        probs: ``[n, V]`` float32, normalised; may be modified.
        rows: ``n`` sampling rows; whether they are greedy is not looked at.

    Returns:
        ``[n, V]`` float32.
    """
    if not (rows.has_rank_filter or rows.has_min_p) or probs.numel() == 0:
        return probs
    if probs.device.type != "cpu":
        if rows.has_rank_filter:
            probs = _sorted_filter(probs, rows.top_k, rows.top_p)
        return _min_p_and_normalise(probs, rows.min_p)
    ranked = (rows.top_k < probs.shape[1]) | (rows.top_p < 1)
    index = ranked.nonzero().view(-1)
    if index.numel():
        part = rows.take(index)
        probs[index] = _rank_filter(probs[index], part.top_k, part.top_p)
    index = (ranked | (rows.min_p > 0)).nonzero().view(-1)
    if index.numel():
        probs[index] = _min_p_and_normalise(probs[index], rows.min_p[index])
    return probs


def _min_p_and_normalise(probs: Tensor, min_p: Tensor) -> Tensor:
    # The best token survives top-k and top-p, so the maximum may be taken after them.
    threshold = probs.amax(dim=-1, keepdim=True) * min_p.view(-1, 1)
    probs = probs.masked_fill(probs < threshold, 0.0)
    return probs / probs.sum(dim=-1, keepdim=True)


def _kept_in_order(ordered: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Mask of kept entries for (a prefix of) descending probabilities: plain decoding's rule."""
    mass_before = torch.cumsum(ordered, dim=-1) - ordered
    rank = torch.arange(ordered.shape[1], device=ordered.device)
    return (rank < top_k.view(-1, 1)) & ~(mass_before > top_p.view(-1, 1))


def _sorted_filter(probs: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    # The sort call is the one plain decoding makes: torch's default sort is not stable, so only
    # the same call resolves ties at the cut in the same way.
    ordered, index = probs.sort(dim=-1, descending=True)
    ordered = ordered * _kept_in_order(ordered, top_k, top_p)
    return torch.zeros_like(probs).scatter_(1, index, ordered)


def _rank_filter(probs: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Top-k and top-p of ``[m, V]``, sorting only rows whose cut lies deep or in a tie."""
    width = min(_MAX_CANDIDATES, int(top_k.max()) + 1)
    if width >= probs.shape[1]:
        return _sorted_filter(probs, top_k, top_p)
    best = probs.topk(width, dim=-1).values
    kept = _kept_in_order(best, top_k, top_p)
    count = kept.sum(dim=-1, keepdim=True)
    last_kept = best.gather(1, count - 1)
    first_dropped = best.gather(1, count.clamp(max=width - 1))
    # With a gap at the cut, the kept set is a threshold on p and needs no order at all. Zeros at
    # the cut are harmless too: kept or dropped, they stay 0.
    clear = (count < width) & (last_kept > first_dropped) | (last_kept <= 0)
    filtered = probs.masked_fill(probs < last_kept, 0.0)
    unclear = (~clear).view(-1).nonzero().view(-1)
    if unclear.numel():
        filtered[unclear] = _sorted_filter(probs[unclear], top_k[unclear], top_p[unclear])
    return filtered
