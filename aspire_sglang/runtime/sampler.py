"""From the logits of a mixed step to new drafts and accepted runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from aspire_sglang.runtime.batching import StepPlan
from aspire_sglang.runtime.draft_state import DraftState, SlotState
from aspire_sglang.sampling.drafting import DraftProbs, sample_draft
from aspire_sglang.sampling.mixed import verify
from aspire_sglang.sampling.processors import SamplingRows, target_probs


@dataclass(frozen=True)
class Accepted:
    """Outcome of the verify rows of one step, in the order of ``StepPlan.verify_rows``.

    ``tokens``: ``[n, gamma_max + 1]`` int64, accepted drafts then one token of the target.
    ``accept_lens``: tokens to commit per row (accepted drafts + 1).
    """

    tokens: torch.Tensor
    accept_lens: list[int]


class StepSampler:
    """Greedy rows are decided by argmax, sampled rows by rejection sampling."""

    def __init__(self, state: DraftState, *, confidence: bool) -> None:
        """``confidence``: note the draft's probability of the tokens of greedy rows."""
        self._state = state
        self._confidence = confidence

    def step(
        self, plan: StepPlan, states: list[SlotState], logits: torch.Tensor, sampling_info: Any
    ) -> Accepted:
        """Extend the drafts of draft rows and judge the drafts of verify rows.

        Args:
            logits: ``[T, V]`` rows of the step's query tokens.
            sampling_info: SGLang's ``SamplingBatchInfo`` of the batch.
        """
        rows = SamplingRows.build(
            sampling_info.temperatures,
            sampling_info.top_ks,
            sampling_info.top_ps,
            sampling_info.min_ps,
            device=logits.device,
        )
        drafts = len(plan.draft_rows)
        if drafts:
            self._draft(plan, states, logits[:drafts], rows)
        if not plan.verify_rows:
            return Accepted(self._state.tokens.new_zeros((0, self._state.tokens.shape[1] + 1)), [])
        return self._verify(plan, states, logits[drafts:], rows)

    def _draft(
        self, plan: StepPlan, states: list[SlotState], logits: torch.Tensor, rows: SamplingRows
    ) -> None:
        best = logits.argmax(dim=-1)
        tokens = best.tolist()
        greedy = rows.greedy.tolist()
        if self._confidence:
            top = logits.gather(1, best.unsqueeze(1)).squeeze(1)
            probabilities = (top - torch.logsumexp(logits, -1)).exp_().tolist()
            for row, probability in zip(plan.draft_rows, probabilities, strict=True):
                if greedy[row]:
                    states[row].confidence.append(probability)
        sampled = [place for place, row in enumerate(plan.draft_rows) if not greedy[row]]
        if sampled:
            index = torch.tensor([plan.draft_rows[place] for place in sampled])
            at = torch.tensor(sampled, device=logits.device)
            drawn = sample_draft(target_probs(logits[at], rows.take(index.to(logits.device))))
            for position, place in enumerate(sampled):
                tokens[place] = int(drawn.tokens[position])
                state = states[plan.draft_rows[place]]
                state.probs.append((drawn.stored[position], drawn.token_probs[position]))
        for row, token in zip(plan.draft_rows, tokens, strict=True):
            self._state.add_draft(plan.slots[row], states[row], token)

    def _verify(
        self, plan: StepPlan, states: list[SlotState], logits: torch.Tensor, rows: SamplingRows
    ) -> Accepted:
        device = self._state.tokens.device
        order = plan.verify_rows
        num_drafts = torch.tensor(
            [plan.pending[row] for row in order], dtype=torch.int64, device=device
        )
        verified = verify(
            logits,
            rows.take(torch.tensor(order, dtype=torch.int64, device=device)),
            self._state.tokens[
                torch.tensor([plan.slots[row] for row in order], dtype=torch.int64, device=device)
            ],
            num_drafts,
            torch.nn.functional.pad((num_drafts + 1).cumsum(0), (1, 0)),
            _draft_probs([states[row] for row in order], self._state.tokens.shape[1]),
        )
        return Accepted(verified.tokens, verified.accept_len.tolist())


def _draft_probs(states: list[SlotState], width: int) -> DraftProbs | None:
    """What the pending drafts of sampled requests were drawn from; None if there are none."""
    kept = [entry for state in states for entry in state.probs]
    if not kept:
        return None
    rows = torch.zeros((len(states), width), dtype=torch.int64)
    chosen = torch.zeros((len(states), width))
    first = 0
    for i, state in enumerate(states):
        count = len(state.probs)
        rows[i, :count] = torch.arange(first, first + count)
        if count:
            chosen[i, :count] = torch.stack([probability for _, probability in state.probs])
        first += count
    stored = torch.stack([distribution for distribution, _ in kept])
    return DraftProbs(stored, rows.to(stored.device), chosen.to(stored.device))
