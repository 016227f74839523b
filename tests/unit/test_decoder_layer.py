"""Decoder layers as programs, against the same layer in float64."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from aspire_sglang.attention.cpu_attention import CpuAttention
from aspire_sglang.attention.cpu_plan import Row
from aspire_sglang.attention.simd import LANES
from aspire_sglang.cpu_platform.decoder_layer import CompiledLayer, Workspace, compiles
from aspire_sglang.cpu_platform.panel_linear import PanelLinear

SLOTS, POSITIONS, EPS = 700, 400, 1e-5
# float32 sums of up to 600 terms, twice in a row.
TOLERANCE = {"atol": 2e-5, "rtol": 2e-4}


@dataclasses.dataclass
class Shape:
    heads: int
    kv_heads: int
    dim: int
    hidden: int
    inner: int


SHAPES = [
    Shape(9, 3, 64, 576, 1536),
    Shape(4, 4, 2 * LANES, 5 * LANES, 3 * LANES),
    Shape(16, 2, 128, 96, 112),
]


class Method:
    """What a packed linear's method has."""

    def __init__(self, weight: Tensor) -> None:
        self.aspire_packed: PanelLinear | None = PanelLinear(weight)


def linear(columns: int, width: int, gen: torch.Generator) -> SimpleNamespace:
    weight = torch.randn(columns, width, generator=gen) / math.sqrt(width)
    return SimpleNamespace(weight=weight, quant_method=Method(weight), bias=None, tp_size=1)


def norm(width: int, gen: torch.Generator) -> SimpleNamespace:
    return SimpleNamespace(weight=torch.rand(width, generator=gen) + 0.5, variance_epsilon=EPS)


class Backend:
    """The attention backend's part, on rows that the test chose."""

    def __init__(self, shape: Shape, rows: list[Row], seed: int) -> None:
        gen = torch.Generator().manual_seed(seed)
        size = (shape.kv_heads, SLOTS, shape.dim)
        self.k, self.v = torch.randn(size, generator=gen), torch.randn(size, generator=gen)
        self.attention = CpuAttention(shape.heads, shape.kv_heads, SLOTS, shape.dim, torch.float32)
        self.phases = self.attention.phases
        self.plan = self.attention.plan(rows)
        self.scale = 1 / math.sqrt(shape.dim)
        self.finished = 0
        self.usable = True

    def computes_layers(self, forward_batch: object) -> bool:
        return self.usable

    def prepare_layer(self, layer: object, q: Tensor, out: Tensor) -> int:
        return self.attention.prepare(q, self.k, self.v, self.plan, self.scale, out)

    def phase_items(self) -> tuple[int, ...]:
        return self.attention.phase_items()

    def finish_layer(self, layer: object) -> None:
        self.finished += 1


class Case:
    """A layer with random weights and its program."""

    def __init__(self, shape: Shape, rows: list[Row], seed: int = 0) -> None:
        gen = torch.Generator().manual_seed(seed)
        q_size, kv_size = shape.heads * shape.dim, shape.kv_heads * shape.dim
        angles = torch.rand(POSITIONS, shape.dim // 2, generator=gen) * 6
        self.shape, self.rows = shape, rows
        self.layer = SimpleNamespace(
            hidden_size=shape.hidden,
            input_layernorm=norm(shape.hidden, gen),
            post_attention_layernorm=norm(shape.hidden, gen),
            self_attn=SimpleNamespace(
                attn=object(),
                num_heads=shape.heads,
                qkv_proj=linear(q_size + 2 * kv_size, shape.hidden, gen),
                o_proj=linear(shape.hidden, q_size, gen),
                rotary_emb=SimpleNamespace(
                    cos_sin_cache=torch.cat((angles.cos(), angles.sin()), 1)
                ),
            ),
            mlp=SimpleNamespace(
                gate_up_proj=linear(2 * shape.inner, shape.hidden, gen),
                down_proj=linear(shape.hidden, shape.inner, gen),
            ),
            forward=lambda *args: "plain",
        )
        self.backend = Backend(shape, rows, seed + 1)
        space = Workspace(shape.hidden, q_size, q_size + 2 * kv_size, shape.inner)
        self.compiled = CompiledLayer(self.layer, space, lambda: self.backend)
        tokens = sum(row.tokens for row in rows)
        self.x = torch.randn(tokens, shape.hidden, generator=gen)
        self.residual = torch.randn(tokens, shape.hidden, generator=gen)
        self.positions = torch.cat(
            [torch.arange(row.length - row.tokens, row.length) for row in rows]
        )
        self.slots = torch.cat([row.slots[-row.tokens :] for row in rows]).long()

    def run(self, residual: Tensor | None):
        batch = SimpleNamespace(out_cache_loc=self.slots)
        return self.compiled.forward(self.positions, self.x, batch, residual)

    def expected(self, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        shape, layer = self.shape, self.layer
        stream = self.x.double() + (0 if residual is None else residual.double())
        attention = layer.self_attn
        qkv = self._norm(stream, layer.input_layernorm) @ attention.qkv_proj.weight.double().T
        qkv = qkv.view(len(qkv), -1, shape.dim)
        q, k, v = qkv.split((shape.heads, shape.kv_heads, shape.kv_heads), 1)
        keys, values = self.backend.k.double(), self.backend.v.double()
        keys[:, self.slots] = self._rotate(k).transpose(0, 1)
        values[:, self.slots] = v.transpose(0, 1)
        q, outs, start = self._rotate(q), [], 0
        for row in self.rows:
            outs.append(self._attend(q[start : start + row.tokens], keys, values, row))
            start += row.tokens
        attended = torch.cat(outs).flatten(1)
        stream = stream + attended @ attention.o_proj.weight.double().T
        normed = self._norm(stream, layer.post_attention_layernorm)
        gate, up = (normed @ layer.mlp.gate_up_proj.weight.double().T).chunk(2, 1)
        gated = torch.nn.functional.silu(gate) * up
        return gated @ layer.mlp.down_proj.weight.double().T, stream

    def _norm(self, x: Tensor, module: SimpleNamespace) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + EPS) * module.weight.double()

    def _rotate(self, x: Tensor) -> Tensor:
        table = self.layer.self_attn.rotary_emb.cos_sin_cache.double()[self.positions][:, None]
        cos, sin = table.chunk(2, -1)
        first, second = x.chunk(2, -1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor, row: Row) -> Tensor:
        group, slots = self.shape.heads // self.shape.kv_heads, row.slots.long()
        k = keys[:, slots].repeat_interleave(group, 0)
        v = values[:, slots].repeat_interleave(group, 0)
        scores = torch.einsum("qhd,hld->hql", q, k) * self.backend.scale
        hidden = torch.ones(row.tokens, row.length).tril(row.length - row.tokens) == 0
        scores = scores.masked_fill(hidden, float("-inf"))
        return torch.einsum("hql,hld->qhd", scores.softmax(-1), v)


def rows_of(*sizes: tuple[int, int]) -> list[Row]:
    """Rows of (keys, query tokens) with slots of their own, scattered."""
    order = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(3)).int()
    rows, start = [], 0
    for keys, tokens in sizes:
        rows.append(Row(order[start : start + keys].clone(), tokens))
        start += keys
    return rows


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("sizes", [[(300, 1), (40, 7), (90, 1)], [(1, 1)], [(200, 133)]], ids=str)
@pytest.mark.parametrize("first", [False, True])
def test_layer(shape: Shape, sizes: list[tuple[int, int]], first: bool) -> None:
    case = Case(shape, rows_of(*sizes))
    residual = None if first else case.residual
    kept = [tensor.clone() for tensor in (case.x, case.residual)]
    want = case.expected(residual)
    for _ in range(2):  # the second call finds its buffers in place
        out, stream = case.run(residual)
        torch.testing.assert_close(stream.double(), want[1], **TOLERANCE)
        torch.testing.assert_close(out.double(), want[0], **TOLERANCE)
    assert torch.equal(case.x, kept[0])
    assert torch.equal(case.residual, kept[1])
    assert case.backend.finished == 2


def test_a_token_is_the_same_whatever_is_computed_beside_it() -> None:
    rows = rows_of((300, 1), (40, 7), (90, 1))
    together = Case(SHAPES[0], rows)
    out, _ = together.run(together.residual)
    start = 0
    for row in rows:
        alone = Case(SHAPES[0], [row])
        alone.backend.k, alone.backend.v = together.backend.k, together.backend.v
        end = start + row.tokens
        alone.x = together.x[start:end].contiguous()
        got, _ = alone.run(together.residual[start:end].contiguous())
        assert torch.equal(got, out[start:end])
        start = end


def test_new_weights_and_more_tokens_are_followed() -> None:
    small, large = rows_of((50, 2)), rows_of((300, 60))
    case = Case(SHAPES[0], small)
    case.run(None)
    projection = case.layer.mlp.down_proj
    projection.weight.mul_(-2)
    projection.quant_method.aspire_packed = PanelLinear(projection.weight)
    case.layer.input_layernorm.weight = torch.rand(576)
    bigger = Case(SHAPES[0], large)
    for name in ("rows", "x", "positions", "slots"):
        setattr(case, name, getattr(bigger, name))
    case.backend.plan = case.backend.attention.plan(large)
    torch.testing.assert_close(case.run(None)[0].double(), case.expected(None)[0], **TOLERANCE)


@pytest.mark.parametrize("fault", ["backend", "weight", "dtype", "strided"])
def test_what_a_program_cannot_serve_goes_to_the_plain_forward(fault: str) -> None:
    case = Case(SHAPES[0], rows_of((50, 2)))
    if fault == "backend":
        case.backend.usable = False
    elif fault == "weight":
        case.layer.self_attn.o_proj.weight = case.layer.self_attn.o_proj.weight.clone()
    elif fault == "dtype":
        case.x = case.x.double()
    else:
        case.x = case.x.repeat(1, 2)[:, ::2]
    assert case.run(None) == "plain"
    assert case.backend.finished == 0


def test_other_layers_are_left_alone() -> None:
    assert not compiles(nn.Linear(3, 3))
