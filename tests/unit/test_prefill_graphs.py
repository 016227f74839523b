"""What SGLang's breakable graphs of a prefill leave to the attention backend at every replay."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph")

from sglang.srt.layers import radix_attention
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph import (
    breakable_cuda_graph as breakable,
)
from sglang.srt.model_executor.runner_backend_utils.tc_piecewise_cuda_graph import (
    set_tc_piecewise_forward_context,
)

PLACES, WIDTH, LAYER = 8, 6, "layer"


class Backend:
    """Answers with the sum of query and batch, and notes what it was given."""

    def __init__(self) -> None:
        self.seen: list[tuple[object, int, torch.Tensor, torch.Tensor]] = []

    def forward(self, q, k, v, layer, forward_batch, save_kv_cache=True, **_):
        places = forward_batch.out_cache_loc.clone()
        self.seen.append((layer, forward_batch.number, q.clone(), places))
        return q + forward_batch.number


def prefill(number: int, tokens: int) -> Any:
    """Context in which a graph of ``PLACES`` tokens runs a batch of so many."""
    batch = SimpleNamespace(
        number=number, num_token_non_padded_cpu=tokens, out_cache_loc=torch.arange(PLACES)
    )
    return set_tc_piecewise_forward_context(
        batch, [LAYER], None, [], [], num_tokens=PLACES, raw_num_tokens=tokens
    )


class Capture:
    """The part of a capture that a break talks to; there is no device."""

    _barrier_fn = None

    def __init__(self) -> None:
        self.ended = self.begun = 0
        self.cuda_graph = SimpleNamespace(_break_fns=[])

    def _end_current_segment(self) -> None:
        self.ended += 1

    def _begin_new_segment(self) -> None:
        self.begun += 1


@pytest.fixture
def op_on_cpu():
    """SGLang gives this operation to PyTorch for its own device only."""

    def run(query, key, value, output, save_kv_cache, layer_id, use_mha_companion=False, **_):
        radix_attention._unified_attention_with_output_impl(
            query, key, value, output, save_kv_cache, layer_id, use_mha_companion, False
        )

    library = torch.library.Library("sglang", "FRAGMENT")
    library.impl("unified_attention_with_output", run, "CPU")
    yield
    library._destroy()


@pytest.mark.usefixtures("op_on_cpu")
def test_attention_runs_at_every_replay_on_the_tokens_of_the_batch(monkeypatch):
    monkeypatch.setattr(breakable, "_weak_ref_if_tensor", lambda value: value)
    backend, capture = Backend(), Capture()
    query, output = torch.zeros(PLACES, WIDTH), torch.full((PLACES, WIDTH), 9.0)

    with forward_context(ForwardContext(attn_backend=backend)):
        token = breakable._current_capture_var.set(capture)
        try:
            with prefill(0, PLACES):
                radix_attention.breakable_unified_attention_with_output(
                    query, query, query, output, True, 0
                )
        finally:
            breakable._current_capture_var.reset(token)
        assert (capture.ended, capture.begun) == (1, 1)
        (replay,) = capture.cuda_graph._break_fns
        # What a graph's piece before the break would have written.
        query.copy_(torch.arange(PLACES * WIDTH).view(PLACES, WIDTH))
        with prefill(100, 5):
            replay()
    layer, number, seen, places = backend.seen[-1]
    assert (len(backend.seen), layer, number) == (2, LAYER, 100)
    assert torch.equal(seen, query[:5])
    assert places.tolist() == [0, 1, 2, 3, 4]
    assert torch.equal(output[:5], query[:5] + 100)
    assert not output[5:].any()
