"""Decoder layers as a program, against the same layers in float64."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from aspire_sglang.attention.cpu_attention import CpuAttention
from aspire_sglang.attention.cpu_plan import Row
from aspire_sglang.attention.simd import LANES
from aspire_sglang.cpu_platform.decoder_stack import DecoderStack, compile_stack, compiles
from aspire_sglang.cpu_platform.panel_linear import PanelLinear

SLOTS, POSITIONS, EPS = 700, 400, 1e-5
# float32 sums of up to 1,500 terms, through a few layers.
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
    """The attention backend's part, on rows that the test chose.

    ``calls`` are the layers that one call of the program may compute.
    """

    def __init__(self, shape: Shape, layers: int, rows: list[Row], seed: int) -> None:
        gen = torch.Generator().manual_seed(seed)
        size = (layers, shape.kv_heads, SLOTS, shape.dim)
        self.k, self.v = torch.randn(size, generator=gen), torch.randn(size, generator=gen)
        self.attention = CpuAttention(shape.heads, shape.kv_heads, SLOTS, shape.dim, torch.float32)
        self.phases = self.attention.phases
        self.plan = self.attention.plan(rows)
        self.calls = [layers]
        self.finished: list[int] = []

    def prepare_layers(
        self, jobs: np.ndarray, first: int, q: Tensor, out: Tensor
    ) -> tuple[int, tuple[int, ...]]:
        stop = min(end for end in self.calls if end > first)
        keys, values = (
            np.array([layer.data_ptr() for layer in pool[first:stop]]) for pool in (self.k, self.v)
        )
        part = jobs[first:stop]
        return stop, self.attention.prepare(part, keys, values, q, out, self.plan, first)

    def finish_layer(self, layer: int) -> None:
        self.finished.append(layer)


class Case:
    """Layers with random weights and their program."""

    def __init__(self, shape: Shape, rows: list[Row], layers: int = 3, seed: int = 0) -> None:
        gen = torch.Generator().manual_seed(seed)
        angles = torch.rand(POSITIONS, shape.dim // 2, generator=gen) * 6
        self.shape, self.rows = shape, rows
        rotary = SimpleNamespace(cos_sin_cache=torch.cat((angles.cos(), angles.sin()), 1))
        self.layers = [self._layer(gen, rotary) for _ in range(layers)]
        self.backend = Backend(shape, layers, rows, seed + 1)
        self.stack = DecoderStack(self.layers)
        tokens = sum(row.tokens for row in rows)
        self.x = torch.randn(tokens, shape.hidden, generator=gen)
        self.positions = torch.cat(
            [torch.arange(row.length - row.tokens, row.length) for row in rows]
        )
        self.slots = torch.cat([row.slots[-row.tokens :] for row in rows]).long()

    def _layer(self, gen: torch.Generator, rotary: SimpleNamespace) -> SimpleNamespace:
        shape = self.shape
        q_size, kv_size = shape.heads * shape.dim, shape.kv_heads * shape.dim
        return SimpleNamespace(
            hidden_size=shape.hidden,
            input_layernorm=norm(shape.hidden, gen),
            post_attention_layernorm=norm(shape.hidden, gen),
            self_attn=SimpleNamespace(
                attn=SimpleNamespace(scaling=1 / math.sqrt(shape.dim), logit_cap=0.0),
                num_heads=shape.heads,
                q_size=q_size,
                kv_size=kv_size,
                qkv_proj=linear(q_size + 2 * kv_size, shape.hidden, gen),
                o_proj=linear(shape.hidden, q_size, gen),
                rotary_emb=rotary,
            ),
            mlp=SimpleNamespace(
                gate_up_proj=linear(2 * shape.inner, shape.hidden, gen),
                down_proj=linear(shape.hidden, shape.inner, gen),
            ),
        )

    def serves(self) -> bool:
        return self.stack.serves(self.x, self.positions, self.slots)

    def run(self) -> tuple[Tensor, Tensor]:
        assert self.serves()
        out, stream = self.stack.run(self.x, self.positions, self.slots, self.backend)
        return out.clone(), stream.clone()

    def expected(self) -> tuple[Tensor, Tensor]:
        x, stream = self.x.double(), torch.zeros_like(self.x).double()
        for number in range(len(self.layers)):
            x, stream = self._expected(number, x, stream)
        return x, stream

    def _expected(self, number: int, x: Tensor, stream: Tensor) -> tuple[Tensor, Tensor]:
        shape, layer = self.shape, self.layers[number]
        stream = stream + x
        attention = layer.self_attn
        qkv = self._norm(stream, layer.input_layernorm) @ attention.qkv_proj.weight.double().T
        qkv = qkv.view(len(qkv), -1, shape.dim)
        q, k, v = qkv.split((shape.heads, shape.kv_heads, shape.kv_heads), 1)
        keys, values = self.backend.k[number].double(), self.backend.v[number].double()
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
        table = self.layers[0].self_attn.rotary_emb.cos_sin_cache.double()[self.positions][:, None]
        cos, sin = table.chunk(2, -1)
        first, second = x.chunk(2, -1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor, row: Row) -> Tensor:
        group, slots = self.shape.heads // self.shape.kv_heads, row.slots.long()
        k = keys[:, slots].repeat_interleave(group, 0)
        v = values[:, slots].repeat_interleave(group, 0)
        scores = torch.einsum("qhd,hld->hql", q, k) / math.sqrt(self.shape.dim)
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
@pytest.mark.parametrize("layers", [1, 2, 3])
def test_layers(shape: Shape, sizes: list[tuple[int, int]], layers: int) -> None:
    case = Case(shape, rows_of(*sizes), layers)
    given, want = case.x.clone(), case.expected()
    for _ in range(2):  # the second call finds its buffers in place
        for got, right in zip(case.run(), want, strict=True):
            torch.testing.assert_close(got.double(), right, **TOLERANCE)
    assert torch.equal(case.x, given)


def test_layers_in_several_calls() -> None:
    case = Case(SHAPES[0], rows_of((300, 1), (40, 7)))
    together = case.run()
    assert case.backend.finished == [2]
    case.backend.calls = [1, 2, 3]
    apart = case.run()
    assert case.backend.finished == [2, 0, 1, 2]
    assert all(map(torch.equal, together, apart))


def test_a_token_is_the_same_whatever_is_computed_beside_it() -> None:
    rows = rows_of((300, 1), (40, 7), (90, 1))
    together = Case(SHAPES[0], rows)
    out, _ = together.run()
    start = 0
    for row in rows:
        alone = Case(SHAPES[0], [row])
        alone.backend.k, alone.backend.v = together.backend.k, together.backend.v
        end = start + row.tokens
        alone.x = together.x[start:end].contiguous()
        assert torch.equal(alone.run()[0], out[start:end])
        start = end


def test_new_weights_and_more_tokens_are_followed() -> None:
    small, large = rows_of((50, 2)), rows_of((300, 60))
    case = Case(SHAPES[0], small)
    case.run()
    projection = case.layers[1].mlp.down_proj
    projection.weight.mul_(-2)
    projection.quant_method.aspire_packed = PanelLinear(projection.weight)
    case.layers[2].input_layernorm.weight = torch.rand(576)
    bigger = Case(SHAPES[0], large)
    for name in ("rows", "x", "positions", "slots"):
        setattr(case, name, getattr(bigger, name))
    case.backend.plan = case.backend.attention.plan(large)
    torch.testing.assert_close(case.run()[0].double(), case.expected()[0], **TOLERANCE)


@pytest.mark.parametrize("fault", ["weight", "unpacked", "dtype", "strided", "empty", "positions"])
def test_what_a_program_cannot_serve(fault: str) -> None:
    case = Case(SHAPES[0], rows_of((50, 2)))
    assert case.serves()
    attention = case.layers[2].self_attn
    if fault == "weight":
        attention.o_proj.weight = attention.o_proj.weight.clone()
    elif fault == "unpacked":
        attention.o_proj.quant_method.aspire_packed = None
    elif fault == "dtype":
        case.x = case.x.double()
    elif fault == "strided":
        case.x = case.x.repeat(1, 2)[:, ::2]
    elif fault == "empty":
        case.x = case.x[:0]
    else:
        case.positions = case.positions.int()
    assert not case.serves()


def test_a_position_without_angles() -> None:
    case = Case(SHAPES[0], rows_of((50, 2)))
    case.positions[1] = POSITIONS
    with pytest.raises(IndexError, match="400"):
        case.run()


def test_other_models_are_left_alone() -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    assert not compiles(model[0])
    assert compile_stack(model) == 0
    assert model(torch.ones(1, 3)).shape == (1, 3)
