"""Debugging aid: do all tensor-parallel ranks really decide alike?

With ``ASPIRE_CHECK_RANKS=1`` in the environment every step compares, before its forward, what each
rank is about to do. Ranks that do different things would otherwise wait for each other for ever, or
mix up each other's sums without a sign.
"""

from __future__ import annotations

import hashlib
import os
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from aspire_sglang.context.page_lists import PageLists
from aspire_sglang.runtime.batching import StepPlan
from aspire_sglang.runtime.ranks import Ranks

if TYPE_CHECKING:
    from aspire_sglang.attention.step_buffers import HostStep, StepView

ENV_CHECK = "ASPIRE_CHECK_RANKS"


class RanksDisagree(RuntimeError):
    """Ranks decided differently; the message says about what."""


def check_wanted() -> bool:
    """Whether the environment asks for the check."""
    return os.environ.get(ENV_CHECK, "0") not in ("", "0")


_SUBJECTS = ("requests", "modes", "tokens", "KV slots", "page lists", "sampling", "step costs")
"""What is compared; ranks that run different kinds of steps must send equally much."""


class RankCheck:
    """Compares the decisions of a step over the ranks, one small message per step.

    On a GPU a comparison waits for the device: this is for looking for faults, not for serving.

    Attributes:
        steps: steps compared so far.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self.steps = 0

    def compare(self, plan: StepPlan, lists: PageLists, costs: tuple[float, ...]) -> None:
        """Check the step that is about to run on the CPU.

        Args:
            lists: page lists, of which those of the step's requests are compared.
            costs: coefficients of the cost model.

        Raises:
            RanksDisagree: naming the step, what differs and the ranks.
        """
        decisions = {
            "requests": (plan.slots, plan.seq_lens),
            "modes": (plan.verify, plan.pending),
            "tokens": (plan.input_ids, plan.positions),
            "KV slots": (plan.out_cache_loc,),
            "page lists": _lists_of(lists, plan.slots),
            "step costs": costs,
        }
        self._compare(len(plan.slots), decisions)

    def compare_staged(
        self, step: HostStep, view: StepView, lists: PageLists, costs: tuple[float, ...]
    ) -> None:
        """Check a mixed step that is about to run on the GPU, whose rows are laid out.

        The tokens are those that the step before drafted and accepted.

        Args:
            lists, costs: as in :meth:`compare`.

        Raises:
            RanksDisagree: likewise.
        """
        count, tokens = len(step.order), step.num_tokens
        decisions = {
            "requests": (step.slots, view.row_lens[:count]),
            "modes": (step.order, step.num_drafts, step.pending),
            "tokens": (view.input_ids[:tokens], view.positions[:tokens]),
            "KV slots": (view.out_cache_loc[:tokens],),
            "page lists": _lists_of(lists, step.slots.tolist()),
            "sampling": (step.temperature, step.keys),
            "step costs": costs,
        }
        self._compare(count, decisions)

    def compare_plain(self, batch: Any, costs: tuple[float, ...]) -> None:
        """Check a plain step that is about to run.

        Args:
            batch: SGLang's ``ScheduleBatch``, prepared.
            costs: as in :meth:`compare`.

        Raises:
            RanksDisagree: likewise.
        """
        decisions = {
            "requests": (batch.req_pool_indices, batch.seq_lens),
            "modes": ("plain",),
            "tokens": (batch.input_ids,),
            "KV slots": (batch.out_cache_loc,),
            "step costs": costs,
        }
        self._compare(len(batch.reqs), decisions)

    def _compare(self, count: int, decisions: dict[str, tuple[Any, ...]]) -> None:
        digests_here = [_digest(decisions.get(subject, ())) for subject in _SUBJECTS]
        everyone = self._ranks.gather(digests_here)
        for name, digests in zip(_SUBJECTS, zip(*everyone, strict=True), strict=True):
            if len(set(digests)) > 1:
                odd = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
                raise RanksDisagree(
                    f"ASPIRE: tensor-parallel ranks disagree about the {name} of decode step "
                    f"{self.steps}: rank {', '.join(map(str, odd))} differs from rank 0 (batch of "
                    f"{count}); the server stops."
                )
        self.steps += 1


def _lists_of(lists: PageLists, slots: list[int]) -> tuple[Tensor, ...]:
    """The page lists of some requests; what lies behind the end of a list does not count."""
    chosen = torch.tensor(slots, dtype=torch.int64, device=lists.pages.device)
    counts = lists.counts[chosen]
    columns = torch.arange(lists.pages.shape[1], device=lists.pages.device)
    pages = lists.pages[chosen] * (columns < counts.view(-1, 1))
    return pages, counts, lists.built_for[chosen]


def _digest(parts: tuple[Any, ...]) -> int:
    """63 bits of a hash of tensors, arrays and lists of numbers."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        if isinstance(part, Tensor):
            digest.update(part.cpu().contiguous().numpy().tobytes())
        elif isinstance(part, np.ndarray):
            digest.update(part.tobytes())
        else:
            digest.update(repr(part).encode())
        digest.update(b"|")
    return int.from_bytes(digest.digest(), "big") >> 1
