"""From the logits of a mixed step to new drafts and accepted runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from aspire_sglang.runtime.batching import StepPlan
from aspire_sglang.runtime.draft_state import DraftState, SlotState
from aspire_sglang.sampling.coupling import draw_coupled
from aspire_sglang.sampling.drafting import DraftProbs, sample_draft
from aspire_sglang.sampling.mixed import Coupling, verify
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
    """Greedy rows are decided by argmax, seeded rows by the noise of their seed and position, the
    other sampled rows by rejection sampling."""

    def __init__(
        self, state: DraftState, *, confidence: bool, sampled: bool = False, gaps: bool = False
    ) -> None:
        """``confidence``: note what is known of the drafts of greedy rows, ``sampled``: of sampled
        rows too; ``gaps``: the gap between the two best tokens included."""
        self._state = state
        self._confidence = confidence
        self._sampled = confidence and sampled
        self._gaps = gaps

    def step(
        self,
        plan: StepPlan,
        states: list[SlotState],
        logits: torch.Tensor,
        sampling_info: Any,
        seeds: list[int | None],
    ) -> Accepted:
        """Extend the drafts of draft rows and judge the drafts of verify rows.

        Args:
            logits: ``[T, V]`` rows of the step's query tokens.
            sampling_info: SGLang's ``SamplingBatchInfo`` of the batch.
            seeds: per request its seed, None where it is not sampled with one.
        """
        rows = SamplingRows.of_batch(sampling_info, logits.device)
        drafts = len(plan.draft_rows)
        if drafts:
            self._draft(plan, states, logits[:drafts], rows, seeds)
        if not plan.verify_rows:
            return Accepted(self._state.tokens.new_zeros((0, self._state.tokens.shape[1] + 1)), [])
        return self._verify(plan, states, logits[drafts:], rows, seeds)

    def _draft(
        self,
        plan: StepPlan,
        states: list[SlotState],
        logits: torch.Tensor,
        rows: SamplingRows,
        seeds: list[int | None],
    ) -> None:
        # Imported late: it brings a kernel that numba compiles, and GPU servers import this module.
        from aspire_sglang.sampling.best import best_tokens

        best, probabilities = best_tokens(logits)
        tokens = best.tolist()
        greedy = rows.greedy.tolist()
        if self._confidence:
            gaps = self._gaps_of(logits)
            known = zip(plan.draft_rows, probabilities.tolist(), gaps, strict=True)
            for row, probability, gap in known:
                if greedy[row]:
                    self._state.note(states[row], False, probability, gap)
        sampled = [place for place, row in enumerate(plan.draft_rows) if not greedy[row]]
        if sampled:
            index = torch.tensor([plan.draft_rows[place] for place in sampled])
            at = torch.tensor(sampled, device=logits.device)
            probs = target_probs(logits[at], rows.take(index.to(logits.device)))
            seed = [seeds[plan.draft_rows[place]] for place in sampled]
            free = [i for i, s in enumerate(seed) if s is None]
            if free:
                drawn = sample_draft(probs if len(free) == len(seed) else probs[free])
                for position, i in enumerate(free):
                    tokens[sampled[i]] = int(drawn.tokens[position])
                    state = states[plan.draft_rows[sampled[i]]]
                    state.probs.append((drawn.stored[position], drawn.token_probs[position]))
            if len(free) < len(seed):
                keyed = [i for i, s in enumerate(seed) if s is not None]
                key = torch.tensor([seed[i] for i in keyed], device=probs.device)
                coupled = draw_coupled(probs[keyed], key, plan.positions[at[keyed]])
                for i, token in zip(keyed, coupled.tolist(), strict=True):
                    tokens[sampled[i]] = token
            if self._sampled:
                drawn_tokens = torch.tensor([tokens[place] for place in sampled])
                chosen = probs.gather(1, drawn_tokens.to(probs.device)[:, None])[:, 0].tolist()
                for place, probability, gap in zip(
                    sampled,
                    chosen,
                    self._gaps_of(probs.log() if self._gaps else probs),
                    strict=True,
                ):
                    self._state.note(states[plan.draft_rows[place]], True, probability, gap)
        for row, token in zip(plan.draft_rows, tokens, strict=True):
            self._state.add_draft(plan.slots[row], states[row], token)

    def _gaps_of(self, logits: torch.Tensor) -> list[float]:
        """Differences of the two highest values of ``[n, V]``; zeros where nobody asks."""
        if not self._gaps:
            return [0.0] * len(logits)
        best = logits.topk(2, dim=-1).values
        gaps: list[float] = (best[:, 0] - best[:, 1]).tolist()
        return gaps

    def _verify(
        self,
        plan: StepPlan,
        states: list[SlotState],
        logits: torch.Tensor,
        rows: SamplingRows,
        seeds: list[int | None],
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
            coupling=_coupling([seeds[row] for row in order], plan.positions[-len(logits) :]),
        )
        return Accepted(verified.tokens, verified.accept_len.tolist())


def _coupling(seeds: list[int | None], positions: torch.Tensor) -> Coupling | None:
    """The seeded requests among the verified ones; ``positions``: of their query tokens."""
    mask = torch.tensor([seed is not None for seed in seeds], device=positions.device)
    if not mask.any():
        return None
    seed = torch.tensor([seed or 0 for seed in seeds], dtype=torch.int64, device=positions.device)
    return Coupling(mask, seed, positions)


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
