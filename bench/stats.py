"""Read what an ASPIRE server tells about its speculation. No other file here knows the keys.

``/generate`` and frontend programs carry it in ``meta_info``; answers in OpenAI's format have no
room for it, so the server also keeps the requests that ended last in ``/server_info``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bench.answer import Answer


@dataclass(frozen=True)
class Speculation:
    """Speculation of one request. ``sequence``: the draft length of each verify, in order."""

    draft_steps: int
    verify_steps: int
    draft_lengths: dict[int, int]
    accept_length: float
    sequence: tuple[int, ...] = ()

    @property
    def mean_draft_length(self) -> float:
        """Drafts per verify."""
        return self.draft_steps / self.verify_steps if self.verify_steps else 0.0


@dataclass(frozen=True)
class Steps:
    """Decode steps of the whole server; mixed ones held a draft row and a verify row."""

    decode: int
    mixed: int

    def __sub__(self, earlier: Steps) -> Steps:
        return Steps(self.decode - earlier.decode, self.mixed - earlier.mixed)

    @property
    def mixed_fraction(self) -> float:
        return self.mixed / self.decode if self.decode else 0.0


def steps(block: Mapping[str, Any]) -> Steps:
    """Totals since the server started."""
    decode = int(block.get("decode_steps", 0))
    fraction = block.get("mixed_step_fraction", 0.0)
    return Steps(decode, int(block.get("mixed_steps", round(fraction * decode))))


def speculation(block: Mapping[str, Any], answer: Answer) -> Speculation:
    """Speculation of one answered request.

    ``accept_length`` is SGLang's own figure, completion tokens per verify, through every door.
    """
    kept = block.get("requests", {}).get(answer.rid, {})
    stats = answer.meta_info.get("aspire") or kept
    if not stats:
        raise LookupError(f"the server tells nothing about the speculation of request {answer.rid}")
    verifies = int(stats["verify_steps"])
    computed = answer.completion_tokens / verifies if verifies else 0.0
    histogram = {int(drafts): int(count) for drafts, count in stats["draft_lengths"].items()}
    return Speculation(
        draft_steps=int(stats["draft_steps"]),
        verify_steps=verifies,
        draft_lengths=dict(sorted(histogram.items())),
        accept_length=float(answer.meta_info.get("spec_accept_length", computed)),
        sequence=tuple(kept.get("draft_length_sequence", ())),
    )
