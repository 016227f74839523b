"""Penalties on a request's own output, for every position of a run.

Plain decoding looks at the output once per token, so the token after ``j`` pending drafts must see
the penalties of the output *and* of those ``j`` drafts. The order is SGLang's: frequency and
presence are subtracted, stop tokens of a too short output are forbidden, and the repetition penalty
scales the result (``sampling/sampling_batch_info.py``, ``apply_logits_bias``; without overlap
scheduling its plain decoding iterates over a set and has no fixed order). Only the output counts,
never the prompt.

Nothing is kept between steps: counts come from the output itself, so a request that was retracted
or moved within its batch needs no care.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Penalties:
    """Parameters of one request; the defaults change nothing.

    ``stop_ids``: the tokens that ``min_new_tokens`` forbids.
    """

    frequency: float = 0.0
    presence: float = 0.0
    repetition: float = 1.0
    min_new_tokens: int = 0
    stop_ids: tuple[int, ...] = ()

    @property
    def of_output(self) -> bool:
        """Whether the tokens of the output matter, and not just their number."""
        return self.frequency != 0.0 or self.presence != 0.0 or self.repetition != 1.0


def penalise(
    logits: Tensor, penalties: Penalties, output: Sequence[int], drafts: Sequence[int]
) -> None:
    """Penalise the logits of consecutive positions of one request, in place.

    Args:
        logits: ``[m, V]`` float. The last row follows ``output`` and all ``drafts``, the row before
            it all drafts but the last, and so on.
        penalties: the request's parameters.
        output: tokens generated so far.
        drafts: pending drafts, at least ``m - 1``.

    Raises:
        ValueError: there are more rows than positions.
    """
    rows = logits.shape[0]
    before = len(drafts) + 1 - rows
    if rows < 1 or before < 0:
        raise ValueError(f"{rows} rows of logits do not fit {len(drafts)} drafts")
    if penalties.of_output:
        ids, counts = token_counts(output, drafts, rows)
        ids, counts = ids.to(logits.device), counts.to(logits.device)
        seen = counts > 0
        change = counts * penalties.frequency + seen * penalties.presence
        # Rounded to the logits' type after each operation, as plain decoding does in place.
        chosen = (logits[:, ids] - change).to(logits.dtype)
        if penalties.repetition != 1.0:
            scaling = torch.where(seen, penalties.repetition, 1.0)
            chosen = scaled(chosen, scaling).to(logits.dtype)
        logits[:, ids] = chosen
    short = penalties.min_new_tokens - len(output) - before
    if short > 0 and penalties.stop_ids:
        stops = torch.tensor(penalties.stop_ids, dtype=torch.int64, device=logits.device)
        logits[:short].index_fill_(1, stops, -torch.inf)


def token_counts(output: Sequence[int], drafts: Sequence[int], rows: int) -> tuple[Tensor, Tensor]:
    """How often each token occurred before each of the last ``rows`` positions.

    Args:
        output, drafts, rows: see :func:`penalise`.

    Returns:
        ``[U]`` int64 distinct tokens and ``[rows, U]`` float32 counts.
    """
    # A copy: the output may grow while the array lives.
    history = torch.from_numpy(
        np.concatenate([np.array(output, dtype=np.int64), np.array(drafts, dtype=np.int64)])
    )
    ids, place = torch.unique(history, return_inverse=True)
    common = len(history) - rows + 1
    counts = torch.zeros((rows, len(ids)))
    counts[0] = torch.bincount(place[:common], minlength=len(ids))
    later = torch.arange(1, rows)
    counts[later, place[common:]] = 1.0
    return ids, counts.cumsum(0)


def scaled(logits: Tensor, scaling: Tensor) -> Tensor:
    """The repetition penalty: ``logits / scaling`` where positive, ``logits * scaling`` below 0."""
    return torch.where(logits < 0, logits * scaling, logits / scaling)


def dense_terms(penalties: Penalties, output: Sequence[int], vocab: int) -> tuple[Tensor, Tensor]:
    """The penalties after ``output`` as vectors over the vocabulary.

    Returns:
        ``[V]`` float32 to add to the logits, then ``[V]`` float32 for :func:`scaled`.
    """
    additive = torch.zeros((1, vocab))
    penalise(additive, replace(penalties, repetition=1.0), output, ())
    scaling = torch.ones(vocab)
    scaling[torch.from_numpy(np.array(output, dtype=np.int64))] = penalties.repetition
    return additive[0], scaling
