"""What came back for one request, and when: the measured side of a round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Answer:
    """A finished request. ``arrivals`` holds (clock, tokens so far) for every streamed event."""

    rid: str
    prompt_ids: list[int]
    text: str = ""
    output_ids: list[int] = field(default_factory=list)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    meta_info: dict[str, Any] = field(default_factory=dict)
    arrivals: list[tuple[float, int]] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        """Speed of this request alone, from its first event to its last."""
        (first, before), (last, after) = self.arrivals[0], self.arrivals[-1]
        return (after - before) / (last - first) if last > first else 0.0


def decode_speed(answers: Sequence[Answer]) -> float:
    """Tokens per second of a whole round while nothing but decoding is going on.

    The clock starts when the last request has its first token, so that no prefill is inside, and
    stops with the last token of all. Only tokens that arrived in between count.
    """
    start = max(answer.arrivals[0][0] for answer in answers)
    end = max(answer.arrivals[-1][0] for answer in answers)
    tokens = sum(
        answer.completion_tokens - max(n for clock, n in answer.arrivals if clock <= start)
        for answer in answers
    )
    return tokens / (end - start) if end > start else 0.0
