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


class MixedGraphs:
    """Replays SGLang's graphs of mixed steps, whose tokens lie where the graphs read them.

    SGLang describes a batch anew and copies it into the graph's memory before every replay, which
    takes a third of the host's time of a step of 64 requests. Nothing of it is needed here, unless
    a feature watches forwards from the outside; then :meth:`of` gives None.

    Args:
        model_runner: SGLang's ``ModelRunner``, whose graphs of mixed steps are captured.
    """

    def __init__(self, model_runner: Any) -> None:
        self._model_runner = model_runner
        runner = model_runner.decode_cuda_graph_runner
        self._backend = runner.backend
        self._keys = {tier: runner._make_graph_key(tier) for tier in runner.capture_num_tokens}

    @classmethod
    def of(cls, model_runner: Any) -> MixedGraphs | None:
        """The graphs, None where SGLang's own way has to be taken."""
        from sglang.srt.eplb import expert_distribution
        from sglang.srt.model_executor.forward_batch_info import enable_num_token_non_padded
        from sglang.srt.model_executor.runner_backend.full_cuda_graph_backend import (
            FullCudaGraphBackend,
        )
        from sglang.srt.state_capturer.indexer_topk import get_global_indexer_capturer
        from sglang.srt.state_capturer.routed_experts import get_global_experts_capturer

        runner, steps = model_runner.decode_cuda_graph_runner, model_runner.attn_backend.steps
        if not isinstance(getattr(runner, "backend", None), FullCudaGraphBackend):
            return None
        if not (steps.adopted and runner.ragged_verify_mode) or enable_num_token_non_padded():
            return None
        watchers = (
            "canary_manager",
            "msprobe_debugger",
            "eplb_manager",
            "hisparse_coordinator",
            "device_timer",
        )
        if any(getattr(model_runner, name) is not None for name in watchers):
            return None
        recorder = expert_distribution.get_global_expert_distribution_recorder()
        if not isinstance(recorder, expert_distribution._ExpertDistributionRecorderNoop):
            return None
        if get_global_experts_capturer() or get_global_indexer_capturer():
            return None
        return cls(model_runner)

    def replay(self, tokens: int) -> Any:
        """Run the graph of a tier on the step in the buffers.

        Returns:
            ``[tokens, V]`` logits, in the graph's memory.
        """
        self._model_runner.forward_pass_id += 1
        output = self._backend.replay(self._keys[tokens], None)
        return output.next_token_logits[:tokens]


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
