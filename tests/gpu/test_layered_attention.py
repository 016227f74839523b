"""Draft page lists per layer on a GPU: the kernels against the definitions, the mixed step against
the CPU implementation, and inside a CUDA graph.
"""

from __future__ import annotations

import pytest
import torch
from triton.runtime.interpreter import InterpretedFunction

from aspire_sglang.attention.step_buffers import HostStep
from aspire_sglang.kernels import layer_tables
from tests.kernels import cases, layer_cases
from tests.kernels.layer_cases import same_selection
from tests.kernels.step_model import Model
from tests.kernels.test_layered_step import LAYERED, PAGES, SMALL_PAGES, run_steps

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(
        isinstance(layer_tables._layer_tables_kernel, InterpretedFunction),
        reason="triton was imported for its interpreter; run tests/gpu in a process of its own",
    ),
]

SHAPES = pytest.mark.parametrize(
    "shape", layer_cases.LAYER_SHAPES.values(), ids=layer_cases.LAYER_SHAPES
)
LONG = {
    "pages of 16": layer_cases.LayerShape((131_072, 40_000, 5000, 100, 0), min_pages=32, last=8),
    "pages of 8": layer_cases.LayerShape((40_960, 7000, 0), page_size=8, min_pages=64, last=16),
    "single tokens": layer_cases.LayerShape(
        (40_960, 7000, 900, 0), page_size=1, min_pages=512, ratio=0.01, sink=16, last=128
    ),
    "a server of 131,072 tokens": layer_cases.LayerShape(
        (131_072, 300), min_pages=32, last=8, kv_page_size=16, num_lists=10
    ),
}


@SHAPES
@pytest.mark.parametrize("kind", cases.SCORES)
def test_selection(shape, kind):
    layer_cases.check_selection(shape, kind, "cuda")


@pytest.mark.parametrize("shape", LONG.values(), ids=LONG)
@pytest.mark.parametrize("kind", ["random", "ties"])
def test_selection_of_a_long_context(shape, kind):
    layer_cases.check_selection(shape, kind, "cuda")


@SHAPES
@pytest.mark.parametrize("growth", [-60, -3, 0, 40])
@pytest.mark.parametrize("listed", [True, False])
def test_tables(shape, growth, listed):
    layer_cases.check_tables(shape, "cuda", growth, listed)


@pytest.mark.parametrize("shape", LONG.values(), ids=LONG)
def test_tables_of_a_long_context(shape):
    layer_cases.check_tables(shape, "cuda", 5, True)


@pytest.mark.parametrize(
    ("name", "page", "kv_page"), [*((name, 16, 1) for name in LAYERED), *SMALL_PAGES]
)
def test_equals_the_cpu_implementation(name, page, kv_page):
    run_steps(Model(kv_page, LAYERED[name], selection=PAGES[page], layers=5, device="cuda"))


@pytest.mark.parametrize("kernel", ["fa3", "triton"])
@pytest.mark.parametrize("name", ["hybrid", "hybrid, two layers a list", "last verify per layer"])
@pytest.mark.parametrize(("page", "kv_page"), [(16, 1), (16, 16), (8, 1), (1, 1)])
def test_one_graph_serves_every_step(kernel, name, page, kv_page):
    """A graph recorded over a step of padding does what eager steps do, bit for bit."""
    rows, tokens = 5, 12
    try:
        eager, captured = (
            Model(
                kv_page, LAYERED[name], reads_all=False, selection=PAGES[page], layers=5,
                device="cuda", dtype=torch.bfloat16, kernel=kernel,
            )
            for _ in range(2)
        )  # fmt: skip
    except RuntimeError as error:
        pytest.skip(str(error))
    shape = (5, tokens, *eager.queries(1).shape[1:])
    q = torch.zeros(shape, dtype=torch.bfloat16, device="cuda")
    outs = torch.zeros_like(q)

    def forward(model: Model, view) -> None:
        model.gpu.plan(view)
        for layer in model.layers():
            model.attend(layer, q[layer.layer_id], outs[layer.layer_id])

    inert = captured.buffers.load_inert(rows, tokens)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        forward(captured, inert)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        forward(captured, inert)
    slots = torch.tensor([1, 2, 4, 3], device="cuda")
    lens = torch.tensor([230, 75, 175, 291], device="cuda")
    ends = torch.arange(1, 5, device="cuda") * 3
    for layer in eager.layers():
        queries = eager.queries(12).to("cuda", torch.bfloat16)
        for model in (eager, captured):
            if layer.layer_id == 0:
                model.gpu.plan_prefill(slots, lens, ends)
            if model.gpu.context.full_rows_vote(layer.layer_id):
                model.gpu.vote_prefill(layer, queries, *model.pools[:, layer.layer_id])
    for seq_lens, pending, verify in (
        ([230, 75, 175, 291], [0, 0, 0, 0], [False] * 4),
        ([230, 75, 175, 291], [1, 1, 1, 1], [False, True, False, True]),
        ([230, 76, 175, 293], [2, 0, 2, 0], [True, True, False, False]),
        ([231, 77, 175, 293], [0, 0, 3, 1], [False, False, True, True]),
        ([231, 77, 176, 295], [1, 1, 0, 0], [False] * 4),
    ):
        host = HostStep.build([1, 2, 4, 3], pending, verify)
        q.copy_(torch.stack([eager.queries(tokens) for _ in range(5)]))
        outs.zero_()
        forward(eager, eager.load(host, rows, tokens, seq_lens))
        wanted = outs.clone()
        outs.zero_()
        captured.load(host, rows, tokens, seq_lens)
        graph.replay()
        torch.cuda.synchronize()
        assert wanted.isfinite().all()
        assert wanted[:, : host.num_tokens].abs().amax((1, 2, 3)).min() > 0
        torch.testing.assert_close(outs, wanted, rtol=0, atol=0)
        same_selection(captured.gpu.context.layer_lists, eager.gpu.context.layer_lists)
