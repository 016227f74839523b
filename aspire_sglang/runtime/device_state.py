"""What the device remembers about each request between steps, by slot of the request pool."""

from __future__ import annotations

import torch
from torch import Tensor

from aspire_sglang.sampling.drafting import DraftProbs


class DeviceState:
    """Tokens and draft distributions that the host never waits for.

    Allocated before the KV pool is sized, so that its memory is not promised twice.

    Attributes:
        drafts: ``[num_slots, G]`` int64 pending drafts; column ``j`` is draft ``j + 1``.
        pending: ``[num_slots]`` int64, how many of them count; the host's number of the last step.
        bonus: ``[num_slots]`` int64, last committed token.
        stored: ``[num_slots * G, V]`` bfloat16, the distribution of each pending draft of a sampled
            request, not normalised; row ``slot * G + j``.
        token_probs: ``[num_slots, G]`` float32, probability with which the draft was drawn.
    """

    def __init__(
        self, num_slots: int, gamma_max: int, vocab: int, device: torch.device | str
    ) -> None:
        self.gamma_max = gamma_max
        self.drafts = torch.zeros((num_slots, gamma_max), dtype=torch.int64, device=device)
        self.pending = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self.bonus = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self.stored = torch.zeros(
            (num_slots * gamma_max, vocab), dtype=torch.bfloat16, device=device
        )
        self.token_probs = torch.zeros((num_slots, gamma_max), dtype=torch.float32, device=device)
        self._columns = torch.arange(gamma_max, device=device)

    @property
    def num_slots(self) -> int:
        return self.drafts.shape[0]

    @property
    def memory(self) -> int:
        """Bytes held."""
        tensors = (self.drafts, self.pending, self.bonus, self.stored, self.token_probs)
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def draft_probs(self, slots: Tensor) -> DraftProbs:
        """Distributions of the pending drafts of ``slots`` (``[n]`` int64)."""
        rows = slots.view(-1, 1) * self.gamma_max + self._columns
        return DraftProbs(self.stored, rows, self.token_probs[slots])
