"""What travels on a batch between steps, and what travels on a forward to the attention backend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.speculative.spec_info import SpecInput, SpecInputType

from aspire_sglang.runtime.batching import StepPlan


@dataclass
class NextStepInput(SpecInput):
    """The last committed token of each running request, carried to the next step.

    SGLang reads the other fields of any algorithm; ASPIRE has no use for them.
    """

    bonus_tokens: torch.Tensor | None = None
    """``[bs]`` int64; None where the worker keeps them on the device."""
    future_indices: torch.Tensor | None = None
    topk_p: torch.Tensor | None = None
    topk_index: torch.Tensor | None = None
    hidden_states: torch.Tensor | None = None
    draft_probs: torch.Tensor | None = None

    def __post_init__(self) -> None:
        # SGLang's enumeration of input types is closed; this is the kind "between two steps".
        super().__init__(SpecInputType.EAGLE_DRAFT)

    def filter_batch(self, new_indices: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """Keep the requests at ``new_indices``."""
        if self.future_indices is not None:
            # Overlap scheduling: SGLang relays the tokens by request slot.
            self.future_indices = self.future_indices[new_indices]
        elif self.bonus_tokens is not None:
            self.bonus_tokens = self.bonus_tokens[new_indices]

    def merge_batch(self, other: NextStepInput) -> None:
        """Append the requests of ``other``."""
        if self.future_indices is not None:
            self.future_indices = torch.cat([self.future_indices, other.future_indices])
        elif self.bonus_tokens is None or other.bonus_tokens is None:
            self.bonus_tokens = None
        else:
            self.bonus_tokens = torch.cat([self.bonus_tokens, other.bonus_tokens])


@dataclass
class MixedForwardInput(SpecInput):
    """A ragged forward over draft and verify rows, as the attention backend needs it."""

    plan: StepPlan
    capture_hidden_mode: CaptureHiddenMode = CaptureHiddenMode.NULL
    topk: int = 1
    custom_mask: None = None
    # One token per request at least: the widths differ, and no consumer may assume a common one.
    num_tokens_per_req: int = 1
    num_tokens_for_logprob_per_req: int = 1

    def __post_init__(self) -> None:
        super().__init__(SpecInputType.DFLASH_VERIFY)

    @property
    def positions(self) -> torch.Tensor:
        """``[T]`` int64; SGLang takes the forward's positions from here."""
        return self.plan.positions


@dataclass
class StagedForwardInput(SpecInput):
    """A ragged forward whose rows lie in the attention backend's step buffers."""

    positions: torch.Tensor | None
    """``[T]`` int64, padding included; None while a graph is captured."""
    ragged_verify_layout: Any
    """``TierLayout`` for a step that a CUDA graph holds, else None."""
    capture_hidden_mode: CaptureHiddenMode = CaptureHiddenMode.NULL
    topk: int = 1
    custom_mask: None = None
    num_tokens_per_req: int = 1
    num_tokens_for_logprob_per_req: int = 1
    staged: bool = True

    def __post_init__(self) -> None:
        super().__init__(SpecInputType.DFLASH_VERIFY)
