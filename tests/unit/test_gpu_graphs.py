"""When graphs of mixed steps are replayed at once, and when as SGLang does."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("sglang.srt.model_executor.forward_batch_info")

from sglang.srt.eplb import expert_distribution
from sglang.srt.model_executor import forward_batch_info
from sglang.srt.model_executor.runner_backend.full_cuda_graph_backend import FullCudaGraphBackend

from aspire_sglang.runtime.gpu_graphs import MixedGraphs


class Backend(FullCudaGraphBackend):
    def __init__(self) -> None:
        self.replayed: list[str] = []

    def replay(self, shape_key, static_forward_batch, **kwargs):
        self.replayed.append(shape_key)
        return SimpleNamespace(next_token_logits=torch.arange(20.0).view(10, 2))


@pytest.fixture
def runner(monkeypatch):
    monkeypatch.setattr(forward_batch_info, "enable_num_token_non_padded", lambda: False)
    noop = expert_distribution._ExpertDistributionRecorderNoop()
    monkeypatch.setattr(
        expert_distribution, "get_global_expert_distribution_recorder", lambda: noop
    )
    for name in ("indexer_topk.get_global_indexer", "routed_experts.get_global_experts"):
        monkeypatch.setattr(f"sglang.srt.state_capturer.{name}_capturer", lambda: None)
    graphs = SimpleNamespace(
        backend=Backend(),
        ragged_verify_mode=True,
        capture_num_tokens=[5, 10],
        _make_graph_key=lambda tokens: f"tier {tokens}",
    )
    return SimpleNamespace(
        decode_cuda_graph_runner=graphs,
        attn_backend=SimpleNamespace(steps=SimpleNamespace(adopted=True)),
        forward_pass_id=0,
        canary_manager=None,
        msprobe_debugger=None,
        eplb_manager=None,
        hisparse_coordinator=None,
        device_timer=None,
    )


def test_a_tier_is_replayed_and_its_logits_are_returned(runner):
    graphs = MixedGraphs.of(runner)
    assert graphs.replay(5).tolist() == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
    assert runner.decode_cuda_graph_runner.backend.replayed == ["tier 5"]
    assert runner.forward_pass_id == 1


def test_nothing_that_watches_forwards_is_passed_by(runner, monkeypatch):
    for name in ("canary_manager", "msprobe_debugger", "eplb_manager", "device_timer"):
        setattr(runner, name, object())
        assert MixedGraphs.of(runner) is None
        setattr(runner, name, None)
    runner.attn_backend.steps.adopted = False
    assert MixedGraphs.of(runner) is None
    runner.attn_backend.steps.adopted = True
    monkeypatch.setattr(
        expert_distribution, "get_global_expert_distribution_recorder", lambda: object()
    )
    assert MixedGraphs.of(runner) is None


def test_other_kinds_of_graphs_are_left_to_sglang(runner):
    runner.decode_cuda_graph_runner.backend = object()
    assert MixedGraphs.of(runner) is None
    runner.decode_cuda_graph_runner = None
    assert MixedGraphs.of(runner) is None
