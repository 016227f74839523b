"""Is an answer a greedy answer? Plain decoding says so, one forward for all of its tokens.

Comparing texts alone would be too strict: two forwards of different shapes round differently, so
where the two best tokens are as good as equal, plain decoding itself may choose either. A token is
greedy-consistent if its log-probability is at most ``tau`` below the best one at its place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from bench.answer import Answer

# tau is measured on plain decoding itself; these bounds keep a lucky or a broken measurement from
# making the test impossible or empty.
TAU_BOUNDS = {"float32": (1e-3, 1e-2), "bfloat16": (5e-2, 5e-1)}
MARGIN = 1.5


def tau(plain_gaps: Sequence[Sequence[float]], dtype: str) -> float:
    """Allowed gap: 1.5 times the largest one that plain decoding shows against its own prefill."""
    low, high = TAU_BOUNDS[dtype]
    largest = max((gap for gaps in plain_gaps for gap in gaps), default=0.0)
    return min(max(MARGIN * largest, low), high)


def is_consistent(gaps: Sequence[float], allowed: float) -> bool:
    """Whether every token of an answer was a greedy choice."""
    return bool(gaps) and max(gaps) <= allowed


def score(plain_url: str, answer: Answer) -> list[float]:
    """Per output token: best log-probability at its place minus its own, by plain decoding."""
    if not answer.output_ids:
        return []
    body = {
        "input_ids": answer.prompt_ids + answer.output_ids,
        "sampling_params": {"temperature": 0, "max_new_tokens": 0},
        "return_logprob": True,
        # Only the tokens of the answer are scored: the rest comes from the prefix cache.
        "logprob_start_len": len(answer.prompt_ids) - 1,
        "top_logprobs_num": 1,
    }
    reply = httpx.post(f"{plain_url}/generate", json=body, timeout=600, trust_env=False)
    return gaps(reply.raise_for_status().json()["meta_info"], answer.output_ids)


def gaps(meta_info: Mapping[str, Any], output_ids: Sequence[int]) -> list[float]:
    """Pick the gaps of the last ``len(output_ids)`` tokens out of SGLang's log-probabilities."""
    n = len(output_ids)
    own = meta_info["input_token_logprobs"][-n:]
    best = meta_info["input_top_logprobs"][-n:]
    if [token for _, token, *_ in own] != list(output_ids):
        raise ValueError("the server scored other tokens than it was sent")
    return [top[0][0] - entry[0] for top, entry in zip(best, own, strict=True)]
