"""Mixed steps in SGLang's CUDA graphs.

SGLang captures one graph per *tier*, a number of query tokens, for algorithms whose rows have
different widths. A step is padded to the next tier. The graph of a tier of ``t`` tokens has
``min(t, most rows)`` places for rows. Steps larger than the largest tier run eagerly.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from aspire_sglang.runtime.arguments import is_aspire


@dataclass(frozen=True)
class TierLayout:
    """What SGLang's graph runner asks about a ragged batch.

    ``bs``: rows. ``graph_num_tokens``: the tier. The lengths themselves are in the step buffers.
    """

    bs: int
    graph_num_tokens: int
    cap: int | None = None


def tier_of(runner: Any, rows: int, tokens: int) -> tuple[int, int] | None:
    """Places for rows and tokens of the smallest graph that holds a step, None if there is none.

    Args:
        runner: SGLang's decode graph runner, or None.
    """
    tiers = getattr(runner, "capture_num_tokens", None)
    if not tiers:
        return None
    index = bisect.bisect_left(tiers, tokens)
    if index == len(tiers):
        return None
    places = min(tiers[index], runner.max_bs)
    return (places, tiers[index]) if rows <= places else None


def capture_input(original: Callable[..., Any], runner: Any, num_tokens: int) -> Any:
    """AROUND ``DecodeCudaGraphRunner.get_spec_info``: the input that graphs are captured with."""
    if not is_aspire(runner.model_runner.server_args):
        return original(runner, num_tokens)
    # Imported late: hooks are registered while SGLang is half-imported.
    from aspire_sglang.runtime.spec_inputs import StagedForwardInput

    return StagedForwardInput(positions=None, ragged_verify_layout=None)
