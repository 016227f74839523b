"""One outcome of a step for all tensor-parallel ranks: the first rank's."""

from __future__ import annotations

import math

import torch

from aspire_sglang.runtime.batching import StepPlan
from aspire_sglang.runtime.draft_state import DraftState, SlotState
from aspire_sglang.runtime.ranks import Ranks
from aspire_sglang.runtime.sampler import Accepted


def agree_on_outcome(
    ranks: Ranks,
    plan: StepPlan,
    drafts: DraftState,
    states: list[SlotState],
    accepted: Accepted,
    seconds: float,
) -> tuple[Accepted, float]:
    """Take over what the first rank sampled, accepted and measured.

    All ranks gather the same logits and draw equally many random numbers from equal seeds, so they
    should hold the same outcome already. Whether they do depends on rounding in kernels that the
    schedule must not depend on, and one message carries it all.

    Args:
        plan: the step, the same on every rank.
        drafts, states: after the sampler noted this step's drafts; changed where they differ.
        accepted: of this rank.
        seconds: since the step began, by this rank's clock.

    Returns:
        Accepted runs and seconds, the same on every rank.
    """
    if ranks.alone:
        return accepted, seconds
    rows = [states[row] for row in plan.draft_rows]
    slots = torch.tensor([plan.slots[row] for row in plan.draft_rows], dtype=torch.int64)
    newest = torch.tensor([state.pending - 1 for state in rows], dtype=torch.int64)
    # A request that has no confidence of every draft makes no use of any.
    known = [len(state.confidence) == state.pending for state in rows]
    confidence = [s.confidence[-1] if k else math.nan for s, k in zip(rows, known, strict=True)]
    # float64 holds every token id exactly.
    parts = (
        torch.tensor([seconds, *confidence, *accepted.accept_lens], dtype=torch.float64),
        drafts.tokens[slots, newest].double(),
        accepted.tokens.flatten().double(),
    )
    agreed = ranks.first(torch.cat(parts))
    head, tokens, runs = agreed.split([len(part) for part in parts])
    seconds, *numbers = head.tolist()
    for state, value, note in zip(rows, numbers, known, strict=False):
        if note:
            state.confidence[-1] = value
    drafts.tokens[slots, newest] = tokens.long()
    return Accepted(
        runs.long().view(accepted.tokens.shape), [int(n) for n in numbers[len(rows) :]]
    ), seconds
