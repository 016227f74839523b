"""Decoder layers of Llama's form, each computed in one parallel region.

Between two operators of a step the interpreter runs out of caches that the weights have just gone
through: a layer's twenty small operators spend longer between its products than the products take.
Here a layer is a program of ten phases, and Python runs once per layer.

:func:`compile_layers` finds the layers that the phases can compute and lets their ``forward`` run
the program. Other layers, and calls that a program cannot serve, keep SGLang's own ``forward``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from aspire_sglang.attention.program import Program
from aspire_sglang.attention.simd import LANES
from aspire_sglang.cpu_platform import panel_linear
from aspire_sglang.cpu_platform.layer_phases import (
    LAYER,
    gate_row,
    norm_attended,
    norm_input,
    place_token,
)
from aspire_sglang.cpu_platform.panel_linear import PanelLinear, multiply_panel, num_items

# Projections, in the order of their phases.
_QKV, _OUT, _GATE_UP, _DOWN = range(4)


class Workspace:
    """Intermediate results of a layer, shared by the layers of a model.

    Args:
        hidden: width of the residual stream.
        heads: columns of all query heads.
        qkv: columns of the fused projection.
        inner: width of the MLP.
    """

    def __init__(self, hidden: int, heads: int, qkv: int, inner: int) -> None:
        self._widths = {
            "normed": hidden,
            "qkv": qkv,
            "q": heads,
            "attended": heads,
            "projected": hidden,
            "gate_up": 2 * inner,
            "gated": inner,
        }
        self._tokens = self._threads = 0
        self.version = 0

    def reserve(self, tokens: int) -> None:
        """Make room for so many tokens; a new ``version`` has other addresses."""
        threads = torch.get_num_threads()
        if tokens <= self._tokens and threads == self._threads:
            return
        self._tokens, self._threads = max(tokens, self._tokens), threads
        self.buffers = {
            name: torch.empty(self._tokens, width) for name, width in self._widths.items()
        }
        self.scratch = torch.empty(threads, panel_linear.SCRATCH)
        self.version += 1

    def view(self, name: str, tokens: int, heads: int) -> Tensor:
        """``[tokens, heads, dim]`` of a buffer."""
        return self.buffers[name][:tokens].view(tokens, heads, -1)


class CompiledLayer:
    """The ``forward`` of one of SGLang's ``LlamaDecoderLayer``.

    Args:
        layer: the layer, see :func:`compiles`.
        workspace: of the model.
        backend: returns the attention backend of the running forward.
    """

    def __init__(self, layer: nn.Module, workspace: Workspace, backend: Callable[[], Any]) -> None:
        self._layer, self._workspace, self._backend = layer, workspace, backend
        self._plain = layer.forward
        attention = layer.self_attn
        self._attn, self._heads = attention.attn, attention.num_heads
        self._projections = (
            attention.qkv_proj,
            attention.o_proj,
            layer.mlp.gate_up_proj,
            layer.mlp.down_proj,
        )
        self._packed: list[PanelLinear | None] = [None] * 4
        self._linears = np.zeros(4, panel_linear.JOB)
        self._job = job = np.zeros(1, LAYER)
        job["hidden"] = layer.hidden_size
        job["inner"] = layer.mlp.down_proj.weight.shape[1]
        job["eps_1"] = layer.input_layernorm.variance_epsilon
        job["eps_2"] = layer.post_attention_layernorm.variance_epsilon
        self._version = 0
        self._program: Program | None = None

    def forward(
        self, positions: Tensor, hidden_states: Tensor, forward_batch: Any, residual: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """As ``LlamaDecoderLayer.forward``.

        Args:
            positions: int64 ``[T]``. hidden_states, residual: float32 ``[T, hidden]``.

        Returns:
            The layer's output and the residual stream before it, both ``[T, hidden]``.
        """
        backend = self._backend()
        slots = forward_batch.out_cache_loc
        if not (
            backend.computes_layers(forward_batch)
            and self._refresh_weights()
            and hidden_states.dtype == torch.float32
            and hidden_states.is_contiguous()
            and (residual is None or residual.is_contiguous())
            and positions.dtype == slots.dtype == torch.int64
        ):
            return self._plain(positions, hidden_states, forward_batch, residual)
        layer, job, tokens = self._layer, self._job, hidden_states.shape[0]
        workspace = self._workspace
        workspace.reserve(tokens)
        out, stream = torch.empty_like(hidden_states), torch.empty_like(hidden_states)
        job["x"], job["residual"] = hidden_states.data_ptr(), stream.data_ptr()
        job["before"] = 0 if residual is None else residual.data_ptr()
        job["norm_1"] = layer.input_layernorm.weight.data_ptr()
        job["norm_2"] = layer.post_attention_layernorm.weight.data_ptr()
        job["positions"], job["slots"] = positions.data_ptr(), slots.data_ptr()
        job["cos_sin"] = layer.self_attn.rotary_emb.cos_sin_cache.data_ptr()
        job["attention"] = backend.prepare_layer(
            self._attn,
            workspace.view("q", tokens, self._heads),
            workspace.view("attended", tokens, self._heads),
        )
        if self._version != workspace.version:
            self._place_buffers()
        self._linears["rows"] = tokens
        self._linears["out"][_DOWN] = out.data_ptr()
        program = self._program
        if program is None:
            program = self._program = self._make_program(backend)
        attend, merge = backend.phase_items()
        projections = [num_items(int(columns), tokens) for columns in self._linears["columns"]]
        program.items[:] = (
            tokens,
            projections[_QKV],
            tokens,
            attend,
            merge,
            projections[_OUT],
            tokens,
            projections[_GATE_UP],
            tokens,
            projections[_DOWN],
        )
        program.run()
        backend.finish_layer(self._attn)
        return out, stream

    def _refresh_weights(self) -> bool:
        """Follow new weights; whether all four are laid out in panels."""
        for number, linear in enumerate(self._projections):
            packed = linear.quant_method.aspire_packed
            if packed is None or not packed.matches(linear.weight):
                return False
            if packed is not self._packed[number]:
                packed.write_job(self._linears[number : number + 1])
                self._packed[number] = packed
        return True

    def _place_buffers(self) -> None:
        space, job, linears = self._workspace, self._job, self._linears
        at = {name: buffer.data_ptr() for name, buffer in space.buffers.items()}
        for name in ("normed", "qkv", "projected", "gate_up", "gated"):
            job[name] = at[name]
        linears["x"] = at["normed"], at["attended"], at["normed"], at["gated"]
        # The last projection writes the layer's output.
        linears["out"][:_DOWN] = at["qkv"], at["projected"], at["gate_up"]
        linears["scratch"] = space.scratch.data_ptr()
        self._version = space.version

    def _make_program(self, backend: Any) -> Program:
        program = Program(
            norm_input,
            multiply_panel,
            place_token,
            *backend.phases,
            multiply_panel,
            norm_attended,
            multiply_panel,
            gate_row,
            multiply_panel,
        )
        layer = self._job.ctypes.data
        linears = self._linears.ctypes.data + self._linears.itemsize * np.arange(4)
        attention = self._job["attention"][0]
        program.argument[:] = (
            layer,
            linears[_QKV],
            layer,
            attention,
            attention,
            linears[_OUT],
            layer,
            linears[_GATE_UP],
            layer,
            linears[_DOWN],
        )
        return program


def compile_layers(model: nn.Module) -> int:
    """Let the decoder layers of a packed model run as programs, where they can.

    Args:
        model: a loaded SGLang model that :func:`.packed_linear.pack_model` has seen.

    Returns:
        The number of such layers.
    """
    from sglang.srt.model_executor.forward_context import get_attn_backend

    workspace: Workspace | None = None
    count = 0
    for layer in model.modules():
        if not compiles(layer):
            continue
        if workspace is None:
            attention = layer.self_attn
            workspace = Workspace(
                layer.hidden_size,
                attention.q_size,
                attention.q_size + 2 * attention.kv_size,
                layer.mlp.down_proj.weight.shape[1],
            )
        compiled = CompiledLayer(layer, workspace, get_attn_backend)
        object.__setattr__(layer, "forward", compiled.forward)
        count += 1
    return count


def compiles(layer: nn.Module) -> bool:
    """Whether the phases compute this layer: SGLang's own classes, exactly, in a form they know."""
    from sglang.srt.layers.activation import SiluAndMul
    from sglang.srt.layers.layernorm import RMSNorm
    from sglang.srt.models.llama import LlamaAttention, LlamaDecoderLayer, LlamaMLP

    if type(layer) is not LlamaDecoderLayer:
        return False
    attention, mlp = layer.self_attn, layer.mlp
    norms = (layer.input_layernorm, layer.post_attention_layernorm)
    linears = (attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj)
    return (
        type(attention) is LlamaAttention
        and type(mlp) is LlamaMLP
        and type(mlp.act_fn) is SiluAndMul
        and all(type(norm) is RMSNorm and _plain_norm(norm) for norm in norms)
        and all(_in_panels(linear) for linear in linears)
        and _rotates_halves(attention.rotary_emb, attention.head_dim)
        and layer.hidden_size % LANES == 0
        and mlp.down_proj.weight.shape[1] % LANES == 0
    )


def _plain_norm(norm: Any) -> bool:
    return (
        norm.weight.dtype == torch.float32
        and norm.variance_size_override is None
        and norm.override_orig_dtype is None
    )


def _in_panels(linear: Any) -> bool:
    """Whether a projection is one product with a weight in panels, on this rank alone."""
    packed = getattr(linear.quant_method, "aspire_packed", None)
    return isinstance(packed, PanelLinear) and linear.bias is None and linear.tp_size == 1


def _rotates_halves(rotary: Any, dim: int) -> bool:
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding

    return (
        type(rotary).forward_native is RotaryEmbedding.forward_native
        and rotary.is_neox_style
        and rotary.rotary_dim == rotary.head_size == dim
        and (dim // 2) % LANES == 0
        and rotary.cos_sin_cache.dtype == torch.float32
        and rotary.cos_sin_cache.is_contiguous()
    )
