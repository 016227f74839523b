"""Rounds in which requests follow one another: a slot is taken again as soon as it is free.

Where all requests of a round start together, its end belongs to the slowest of them, which decode
among few others, and schedules are judged by how much of that they cause. A server that is busy all
the time shows more: here more requests are given at once than run, the first of them with outputs
of any length up to the whole, as if they were met in their midst, and only the time counts in which
(nearly) all slots are taken.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

FULL = 0.95
"""Share of the slots that are taken in a step that counts."""


def waves_of(
    prompts: Sequence[list[int]], waves: int, new: int, seed: int = 11
) -> tuple[list[list[int]], list[int]]:
    """Prompts of all requests, in the order in which they are served, and their output lengths.

    Every wave holds each prompt once, in another order.
    """
    rng = random.Random(seed)
    order, lengths = [], []
    for wave in range(waves):
        some = list(range(len(prompts)))
        rng.shuffle(some)
        order += some
        # Of a request that is met at a random moment, any part may be left.
        rest = [1 + new * i // len(prompts) for i in range(len(prompts))]
        rng.shuffle(rest)
        lengths += rest if wave == 0 else [new] * len(prompts)
    return [prompts[i] for i in order], lengths


def full_window(events: Sequence[Sequence[Any]], slots: int) -> dict[str, Any]:
    """Rates while all slots were taken, from the events of ``probe_timeline``.

    ``tokens_per_s``: by the clock, prefills of those who came included.
    ``tokens_per_s_of_device_time``: over the time that the decode steps took the device (plain
    steps: the time between two by the host's clock); None for an engine without ASPIRE.
    """
    least = FULL * slots
    results = [event for event in events if event[0] == "result"]
    full = [index for index, event in enumerate(results) if event[3] >= least]
    found: dict[str, Any] = {"tokens_per_s": None, "tokens_per_s_of_device_time": None}
    if len(full) > 1:
        # The tokens of the first result were made before the window.
        begin, *window = results[full[0] : full[-1] + 1]
        seconds = window[-1][2] - begin[2]
        tokens = sum(event[4] for event in window)
        found |= {"seconds": seconds, "tokens": tokens, "tokens_per_s": tokens / seconds}
    mixed = [event for event in events if event[0] == "device" and event[1] + event[2] >= least]
    plain = [event for event in events if event[0] == "step" and event[5] and event[2] >= least]
    busy = sum(event[5] for event in mixed) + sum(event[4] for event in plain)
    if busy:
        committed = sum(event[8] for event in mixed) + sum(event[2] for event in plain)
        found |= {
            "tokens_per_s_of_device_time": committed / busy,
            "steps": len(mixed) + len(plain),
            "us_per_step": busy / (len(mixed) + len(plain)) * 1e6,
            "device_idle_share": sum(event[7] for event in mixed) / busy,
        }
    return found
