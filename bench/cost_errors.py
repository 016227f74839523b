"""How far predicted step times are from those that ``probe_timeline`` recorded."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from typing import Any


def percentile(ascending: list[float], share: float) -> float:
    """The least value that so many percent of all do not exceed."""
    return ascending[max(math.ceil(len(ascending) * share / 100) - 1, 0)]


def errors_by_bucket(events: list[list[Any]], least: int = 8) -> dict[str, Any]:
    """Errors of the ``device`` events of ``probe_timeline``, relative to what was measured.

    Steps are alike within half a power of two of tokens and of KV tokens; buckets of fewer than
    ``least`` steps are left out.
    """
    buckets: dict[tuple[int, int], list[float]] = defaultdict(list)
    for event in events:
        if event[0] != "device":
            continue
        _, _, _, tokens, kv_tokens, seconds, predicted, *_ = event
        key = round(2 * math.log2(tokens)), round(2 * math.log2(max(kv_tokens, 1)))
        buckets[key].append(abs(predicted / seconds - 1.0))
    every = [error for errors in buckets.values() for error in errors]
    medians = {
        f"{2 ** (tokens / 2):.0f} tokens, {2 ** (kv / 2):.0f} KV": statistics.median(errors)
        for (tokens, kv), errors in buckets.items()
        if len(errors) >= least
    }
    worst = max(medians, key=lambda key: medians[key], default=None)
    return {
        "steps": len(every),
        "median": statistics.median(every) if every else None,
        "p99": percentile(sorted(every), 99) if every else None,
        "worst_bucket": [worst, medians[worst]] if worst else None,
        "buckets": len(medians),
    }
