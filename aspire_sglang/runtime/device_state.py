"""What the device remembers about each request between steps, by slot of the request pool."""

from __future__ import annotations

import torch


class DeviceState:
    """Tokens that the host never waits for.

    Attributes:
        drafts: ``[num_slots, G]`` int64 pending drafts; column ``j`` is draft ``j + 1``.
        pending: ``[num_slots]`` int64, how many of them count; the host's number of the last step.
        bonus: ``[num_slots]`` int64, last committed token.
    """

    def __init__(self, num_slots: int, gamma_max: int, device: torch.device | str) -> None:
        self.gamma_max = gamma_max
        self.drafts = torch.zeros((num_slots, gamma_max), dtype=torch.int64, device=device)
        self.pending = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self.bonus = torch.zeros(num_slots, dtype=torch.int64, device=device)

    @property
    def num_slots(self) -> int:
        return self.drafts.shape[0]
