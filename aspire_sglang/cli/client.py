"""Talking to an ASPIRE server: generate many texts, change its settings, read its statistics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx


def continue_all(
    url: str,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    label: str,
    temperature: float = 0.0,
) -> list[str]:
    """Continue all prompts at once and to full length; return the request ids."""

    def one(numbered: tuple[int, Sequence[int]]) -> str:
        rid = f"{label}-{numbered[0]}"
        body = {
            "rid": rid,
            "input_ids": list(numbered[1]),
            "sampling_params": {
                "temperature": temperature,
                "max_new_tokens": new_tokens,
                "ignore_eos": True,
            },
        }
        httpx.post(f"{url}/generate", json=body, timeout=3600, trust_env=False).raise_for_status()
        return rid

    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(one, enumerate(prompts)))


def reload_config(url: str) -> bool:
    """Make the server read its ``--aspire-config`` again; False if it refuses."""
    body = {"server_args": {"aspire_reload_config": 1}}
    reply = httpx.post(f"{url}/set_internal_state", json=body, timeout=60, trust_env=False)
    return bool(reply.json() == [True])


def aspire_block(url: str) -> dict[str, Any]:
    """The block ``aspire`` of ``/server_info``; empty for a server without speculation."""
    reply = httpx.get(f"{url}/server_info", timeout=60, trust_env=False).raise_for_status()
    block: dict[str, Any] = reply.json()["internal_states"][0].get("aspire", {})
    return block


def full_run_lengths(requests: Sequence[Mapping[str, Any]], gamma: int) -> list[int]:
    """Accept lengths (accepted drafts plus one) of the verifies that held ``gamma`` drafts.

    Args:
        requests: entries of the block's ``requests``.
    """
    return [
        accepted + 1
        for request in requests
        for drafts, accepted in zip(
            request["draft_length_sequence"], request["accepted_sequence"], strict=True
        )
        if drafts == gamma
    ]


def draft_rate(lengths: Sequence[int], gamma: int) -> float:
    """Rate per draft token of such verifies: successes over tries, the first rejection included."""
    return sum(length - 1 for length in lengths) / sum(min(length, gamma) for length in lengths)
