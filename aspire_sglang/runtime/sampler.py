"""From the logits of a mixed step to new drafts and accepted runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from aspire_sglang.runtime.batching import StepPlan
from aspire_sglang.runtime.draft_state import DraftState, SlotState
from aspire_sglang.sampling.drafting import DraftProbs, flat_draft_rows, sample_draft
from aspire_sglang.sampling.processors import SamplingRows, target_probs
from aspire_sglang.sampling.verification import Verified, verify_greedy, verify_rejection


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

    def __init__(self, state: DraftState) -> None:
        self._state = state

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
        argmax = logits.argmax(dim=-1)
        self._draft(plan, states, logits, argmax, rows)
        return self._verify(plan, states, logits, argmax, rows)

    def _draft(
        self,
        plan: StepPlan,
        states: list[SlotState],
        logits: torch.Tensor,
        argmax: torch.Tensor,
        rows: SamplingRows,
    ) -> None:
        greedy, sampled = _by_greedy(plan.draft_rows, rows)
        for row in greedy:
            token = int(argmax[plan.qo_indptr[row]])
            self._state.add_draft(plan.slots[row], states[row], token)
        if not sampled:
            return
        index = torch.tensor(sampled, device=logits.device)
        flat = torch.tensor([plan.qo_indptr[row] for row in sampled], device=logits.device)
        drawn = sample_draft(target_probs(logits[flat], rows.take(index)))
        for position, row in enumerate(sampled):
            states[row].probs.append((drawn.stored[position], drawn.token_probs[position]))
            self._state.add_draft(plan.slots[row], states[row], int(drawn.tokens[position]))

    def _verify(
        self,
        plan: StepPlan,
        states: list[SlotState],
        logits: torch.Tensor,
        argmax: torch.Tensor,
        rows: SamplingRows,
    ) -> Accepted:
        order = plan.verify_rows
        width = self._state.tokens.shape[1] + 1
        tokens = torch.zeros((len(order), width), dtype=torch.int64, device=logits.device)
        accept_lens = torch.ones(len(order), dtype=torch.int64, device=logits.device)
        place = {row: position for position, row in enumerate(order)}
        greedy, sampled = _by_greedy(order, rows)
        for group, judge in ((greedy, self._judge_greedy), (sampled, self._judge_sampled)):
            if group:
                verified = judge(group, plan, states, logits, argmax, rows)
                at = torch.tensor([place[row] for row in group], device=logits.device)
                tokens[at] = verified.tokens
                accept_lens[at] = verified.accept_len
        return Accepted(tokens, accept_lens.tolist())

    def _judge_greedy(self, group, plan, states, logits, argmax, rows) -> Verified:
        flat, qo_indptr, drafts, num_drafts = self._runs(group, plan)
        return verify_greedy(argmax[flat], drafts, num_drafts, qo_indptr)

    def _judge_sampled(self, group, plan, states, logits, argmax, rows) -> Verified:
        flat, qo_indptr, drafts, num_drafts = self._runs(group, plan)
        index = torch.tensor(group, device=logits.device)
        expanded = rows.take(index).expand(num_drafts + 1, total=len(flat))
        kept = [entry for row in group for entry in states[row].probs]
        draft_probs = None
        if kept:
            chosen = torch.zeros(drafts.shape, device=logits.device)
            filled = torch.arange(drafts.shape[1], device=logits.device) < num_drafts[:, None]
            chosen[filled] = torch.stack([probability for _, probability in kept])
            draft_probs = DraftProbs(
                torch.stack([stored for stored, _ in kept]),
                flat_draft_rows(num_drafts, drafts.shape[1]),
                chosen,
            )
        return verify_rejection(
            target_probs(logits[flat], expanded), draft_probs, drafts, num_drafts, qo_indptr
        )

    def _runs(
        self, group: list[int], plan: StepPlan
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Flat logits rows, their ``[n + 1]`` offsets, drafts ``[n, G]`` and their counts."""
        device = self._state.tokens.device
        flat = [t for row in group for t in range(plan.qo_indptr[row], plan.qo_indptr[row + 1])]
        num_drafts = torch.tensor([plan.pending[row] for row in group], device=device)
        qo_indptr = torch.nn.functional.pad((num_drafts + 1).cumsum(0), (1, 0))
        drafts = self._state.tokens[torch.tensor([plan.slots[row] for row in group])]
        return torch.tensor(flat, device=device), qo_indptr, drafts, num_drafts


def _by_greedy(group: list[int], rows: SamplingRows) -> tuple[list[int], list[int]]:
    flags = rows.greedy.tolist()
    return [row for row in group if flags[row]], [row for row in group if not flags[row]]
