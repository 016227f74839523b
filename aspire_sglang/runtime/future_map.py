"""SGLang's relay of tokens and lengths between steps, for this algorithm."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.managers.overlap_utils import FutureMap

from aspire_sglang.runtime.plain_steps import plain_steps_of


class AspireFutureMap(FutureMap):
    """Like SGLang's, but what the worker keeps on the device by itself is not copied again."""

    def __init__(self, device: Any, algorithm: Any, pool: Any, *needs: bool) -> None:
        super().__init__(device, algorithm, pool, *needs)
        self.skips_publish = False
        """The next lengths published are of a plain step: nobody reads them here, the batch itself
        carries them."""
        plain = plain_steps_of(pool)
        if plain is not None:
            plain.attach(self)

    def share_tokens(self, tokens: torch.Tensor) -> None:
        """Keep the last committed tokens in this memory, ``[num_slots]`` int64."""
        self.output_tokens_buf = tokens

    def _resolve_spec_extras(self, batch: Any) -> None:
        info = batch.spec_info
        # Without a token on the input, the worker finds it by slot.
        if info is None or info.bonus_tokens is None or info.future_indices is None:
            return
        info.bonus_tokens = self.output_tokens_buf[info.future_indices]

    def publish(
        self, future_indices: torch.Tensor, new_seq_lens: torch.Tensor, confidence: Any = None
    ) -> None:
        if self.skips_publish:
            self.skips_publish = False
        else:
            super().publish(future_indices, new_seq_lens, confidence)

    def stash(self, future_indices: torch.Tensor, payload: Any) -> None:
        if payload.bonus_tokens is not None:
            super().stash(future_indices, payload)
