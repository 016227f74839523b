"""Debugging aid: do all tensor-parallel ranks really decide alike?

With ``ASPIRE_CHECK_RANKS=1`` in the environment every step compares, before its forward, what each
rank is about to do. Ranks that do different things would otherwise wait for each other for ever, or
mix up each other's sums without a sign.
"""

from __future__ import annotations

import hashlib
import os
from typing import Any

import torch
from torch import Tensor

from aspire_sglang.context.page_lists import PageLists
from aspire_sglang.runtime.batching import StepPlan
from aspire_sglang.runtime.ranks import Ranks

ENV_CHECK = "ASPIRE_CHECK_RANKS"


class RanksDisagree(RuntimeError):
    """Ranks decided differently; the message says about what."""


def check_wanted() -> bool:
    """Whether the environment asks for the check."""
    return os.environ.get(ENV_CHECK, "0") not in ("", "0")


class RankCheck:
    """Compares the decisions of a step over the ranks, one small message per step.

    Attributes:
        steps: steps compared so far.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self.steps = 0

    def compare(self, plan: StepPlan, lists: PageLists, costs: tuple[float, ...]) -> None:
        """Check the step that is about to run.

        Args:
            lists: page lists, of which those of the step's requests are compared.
            costs: coefficients of the cost model.

        Raises:
            RanksDisagree: naming the step, what differs and the ranks.
        """
        slots = torch.tensor(plan.slots, dtype=torch.int64)
        columns = torch.arange(lists.pages.shape[1])
        pages = lists.pages[slots] * (columns < lists.counts[slots].view(-1, 1))
        decisions = {
            "requests": (plan.slots, plan.seq_lens),
            "modes": (plan.verify, plan.pending),
            "tokens": (plan.input_ids, plan.positions),
            "KV slots": (plan.out_cache_loc,),
            "page lists": (pages, lists.counts[slots], lists.built_for[slots]),
            "step costs": costs,
        }
        everyone = self._ranks.gather([_digest(parts) for parts in decisions.values()])
        for name, digests in zip(decisions, zip(*everyone, strict=True), strict=True):
            if len(set(digests)) > 1:
                odd = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
                raise RanksDisagree(
                    f"ASPIRE: tensor-parallel ranks disagree about the {name} of decode step "
                    f"{self.steps}: rank {', '.join(map(str, odd))} differs from rank 0 (batch of "
                    f"{len(plan.slots)}); the server stops."
                )
        self.steps += 1


def _digest(parts: tuple[Any, ...]) -> int:
    """63 bits of a hash of tensors and lists of numbers."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        if isinstance(part, Tensor):
            digest.update(part.contiguous().numpy().tobytes())
        else:
            digest.update(repr(part).encode())
        digest.update(b"|")
    return int.from_bytes(digest.digest(), "big") >> 1
