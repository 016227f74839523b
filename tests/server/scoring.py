"""Greedy-consistency: is every token of an output a greedy choice of plain decoding?"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.server.client import Client

# Largest gap between decode and prefill log-probabilities that plain decoding itself shows in
# float32 (about 1e-5 here), with a wide margin; a wrong token costs orders of magnitude more.
TAU = 1e-3


def gaps(plain: Client, prompt_ids: list[int], output_ids: list[int]) -> list[float]:
    """Per output token: log-probability of the best token at its place minus its own."""
    if not output_ids:
        return []
    meta: dict[str, Any] = plain.generate(
        prompt_ids + output_ids,
        max_new_tokens=0,
        return_logprob=True,
        logprob_start_len=len(prompt_ids) - 1,
        top_logprobs_num=1,
    )["meta_info"]
    n = len(output_ids)
    own, best = meta["input_token_logprobs"][-n:], meta["input_top_logprobs"][-n:]
    assert [token for _, token, *_ in own] == output_ids
    return [top[0][0] - entry[0] for top, entry in zip(best, own, strict=True)]


def assert_greedy(plain: Client, prompt_ids: list[int], output_ids: list[int]) -> None:
    found = gaps(plain, prompt_ids, output_ids)
    assert max(found, default=0.0) <= TAU, f"gap {max(found)} at token {found.index(max(found))}"


def assert_all_greedy(
    plain: Client, prompts: Sequence[list[int]], answers: Sequence[dict[str, Any]]
) -> None:
    """Score many answers at once: prefills of several texts share their steps."""
    with ThreadPoolExecutor(16) as pool:
        outputs = [answer["output_ids"] for answer in answers]
        list(pool.map(lambda pair: assert_greedy(plain, *pair), zip(prompts, outputs, strict=True)))
