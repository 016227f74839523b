"""Mixed steps and plain steps in SGLang's CUDA graphs.

SGLang captures one graph per *tier*, a number of query tokens, for algorithms whose rows have
different widths. A step is padded to the next tier. The graph of a tier of ``t`` tokens has
``min(t, most rows)`` places for rows. Steps larger than the largest tier run eagerly.

In a phase in which nobody drafts (:mod:`aspire_sglang.runtime.plain_steps`) steps run in the graphs
that plain decoding has: no page tables, no votes, no padding to a tier.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
    if not is_aspire(runner.model_runner.server_args) or runner.capture_forward_mode.is_decode():
        return original(runner, num_tokens)
    # Imported late: hooks are registered while SGLang is half-imported.
    from aspire_sglang.runtime.spec_inputs import StagedForwardInput

    return StagedForwardInput(positions=None, ragged_verify_layout=None)


class PlainGraphs:
    """SGLang's graphs of plain decode steps, beside its graphs of mixed steps.

    Args:
        model_runner: SGLang's ``ModelRunner``, whose graphs of mixed steps are captured.
    """

    def __init__(self, model_runner: Any) -> None:
        from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner
        from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

        self._model_runner = model_runner
        backend, algorithm = model_runner.attn_backend, model_runner.spec_algorithm
        hooks = model_runner.capture_tail_hooks
        # The algorithm decides the mode and the widths that a graph runner captures.
        model_runner.spec_algorithm = SpeculativeAlgorithm.NONE
        # Tokens are chosen by SGLang's sampler.
        model_runner.capture_tail_hooks = []
        backend.captures_plain = True
        try:
            self._runner = DecodeCudaGraphRunner(model_runner)
        finally:
            model_runner.spec_algorithm = algorithm
            model_runner.capture_tail_hooks = hooks
            backend.captures_plain = False

    def places(self, rows: int) -> int | None:
        """Row places of the smallest graph that holds a plain step, None if there is none."""
        sizes = self._runner.capture_bs
        index = bisect.bisect_left(sizes, rows)
        return sizes[index] if index < len(sizes) else None

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Within, the model's decode steps run in these graphs."""
        usual = self._model_runner.decode_cuda_graph_runner
        self._model_runner.decode_cuda_graph_runner = self._runner
        try:
            yield
        finally:
            self._model_runner.decode_cuda_graph_runner = usual
