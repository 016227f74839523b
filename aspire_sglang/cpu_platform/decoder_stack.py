"""The decoder layers of a model of Llama's form, computed by one program.

Between two operators of a step the interpreter runs out of caches that the weights have just gone
through: a layer's twenty small operators take longer to start than to compute. Here a layer is ten
phases of a program, and all layers that attend by the same plan are one call.

:func:`compile_stack` finds models that the phases can compute and lets their ``forward`` run the
program. Other models, and calls that the program cannot serve, keep SGLang's own ``forward``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from aspire_sglang.attention import cpu_job
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

# Projections of a layer, in the order of their phases.
_QKV, _OUT, _GATE_UP, _DOWN = range(4)
# Phases of a layer: the projections, those with an item per token, and the attention's two.
_PROJECTIONS, _PER_TOKEN, _ATTENTION = (1, 5, 7, 9), (0, 2, 6, 8), (3, 4)
_PHASES = 10


class DecoderStack:
    """The layers of one ``LlamaModel``.

    Args:
        layers: SGLang's ``LlamaDecoderLayer``, see :func:`compiles`.
    """

    def __init__(self, layers: list[Any]) -> None:
        self._layers = layers
        count, first = len(layers), layers[0]
        attention = first.self_attn
        self._heads, self._hidden = attention.num_heads, first.hidden_size
        inner = first.mlp.down_proj.weight.shape[1]
        self._widths = {
            "x": self._hidden,
            "other_x": self._hidden,
            "stream": self._hidden,
            "other_stream": self._hidden,
            "normed": self._hidden,
            "qkv": attention.q_size + 2 * attention.kv_size,
            "q": attention.q_size,
            "attended": attention.q_size,
            "projected": self._hidden,
            "gate_up": 2 * inner,
            "gated": inner,
        }
        self._projections = [_projections(layer) for layer in layers]
        self._packed: list[list[PanelLinear | None]] = [[None] * 4 for _ in layers]
        self._tokens = self._threads = 0
        self._jobs = np.zeros(count, LAYER)
        self._linears = np.zeros((count, 4), panel_linear.JOB)
        self._attention = np.zeros(count, cpu_job.JOB)
        self._jobs["hidden"], self._jobs["inner"] = self._hidden, inner
        self._jobs["eps_1"] = [layer.input_layernorm.variance_epsilon for layer in layers]
        self._jobs["eps_2"] = [layer.post_attention_layernorm.variance_epsilon for layer in layers]
        self._jobs["attention"] = _addresses(self._attention)
        attentions = [layer.self_attn.attn for layer in layers]
        cpu_job.write_scales(
            self._attention,
            [attention.scaling for attention in attentions],
            [attention.logit_cap for attention in attentions],
        )
        self._program: Program | None = None

    def serves(self, hidden: Tensor, positions: Tensor, slots: Tensor) -> bool:
        """Whether a program can compute this forward; see :meth:`run`."""
        return (
            hidden.dtype == torch.float32
            and hidden.is_contiguous()
            and hidden.shape[0] > 0
            and positions.dtype == slots.dtype == torch.int64
            and positions.is_contiguous()
            and slots.is_contiguous()
            and self._follow_weights()
        )

    def run(
        self, hidden: Tensor, positions: Tensor, slots: Tensor, backend: Any
    ) -> tuple[Tensor, Tensor]:
        """Compute all layers.

        Args:
            hidden: float32 ``[T, hidden]``, contiguous.
            positions: int64 ``[T]``. slots: int64 ``[T]`` of the KV pool, to write.
            backend: attention, with ``phases``, ``prepare_layers`` and ``finish_layer``.

        Returns:
            The last layer's output and the residual stream before it, ``[T, hidden]`` both; good
            until the next call.

        Raises:
            IndexError: a position that the rotary embedding has no angles for.
        """
        tokens, count = hidden.shape[0], len(self._layers)
        cos_sin = self._layers[0].self_attn.rotary_emb.cos_sin_cache
        if int(positions.max()) >= cos_sin.shape[0]:
            raise IndexError(f"position {int(positions.max())} of {cos_sin.shape[0]}")
        self._reserve(tokens)
        program = self._program or self._make_program(backend.phases)
        jobs = self._jobs
        jobs["x"][0] = hidden.data_ptr()
        jobs["positions"], jobs["slots"] = positions.data_ptr(), slots.data_ptr()
        jobs["cos_sin"] = cos_sin.data_ptr()
        self._linears["rows"] = tokens
        items = program.items.reshape(count, _PHASES)
        items[:, _PER_TOKEN] = tokens
        items[:, _PROJECTIONS] = [num_items(int(n), tokens) for n in self._linears[0]["columns"]]
        shape = (tokens, self._heads, -1)
        q, out = (self._buffers[name][:tokens].view(shape) for name in ("q", "attended"))
        first = 0
        while first < count:
            stop, attention_items = backend.prepare_layers(self._attention, first, q, out)
            items[first:stop, _ATTENTION] = attention_items
            program.run(first * _PHASES, stop * _PHASES)
            backend.finish_layer(stop - 1)
            first = stop
        x, stream = self._places(count)
        return self._buffers[x][:tokens], self._buffers[stream][:tokens]

    def _follow_weights(self) -> bool:
        """Note where the weights are; whether all projections are laid out in panels."""
        for number, projections in enumerate(self._projections):
            known = self._packed[number]
            for place, linear in enumerate(projections):
                packed = linear.quant_method.aspire_packed
                if packed is None or not packed.matches(linear.weight):
                    return False
                if packed is not known[place]:
                    packed.write_job(self._linears[number, place : place + 1])
                    known[place] = packed
        self._jobs["norm_1"] = [layer.input_layernorm.weight.data_ptr() for layer in self._layers]
        self._jobs["norm_2"] = [
            layer.post_attention_layernorm.weight.data_ptr() for layer in self._layers
        ]
        return True

    def _places(self, layer: int) -> tuple[str, str]:
        """Buffers of a layer's input and of the residual stream before it."""
        return ("other_x", "other_stream") if layer % 2 else ("x", "stream")

    def _reserve(self, tokens: int) -> None:
        """Make room for so many tokens, and for what each thread needs."""
        threads = torch.get_num_threads()
        if tokens <= self._tokens and threads == self._threads:
            return
        self._tokens, self._threads = max(tokens, self._tokens), threads
        self._buffers = {
            name: torch.empty(self._tokens, width) for name, width in self._widths.items()
        }
        self._scratch = torch.empty(threads, panel_linear.SCRATCH)
        at = {name: buffer.data_ptr() for name, buffer in self._buffers.items()}
        jobs, linears = self._jobs, self._linears
        for name in ("normed", "qkv", "projected", "gate_up", "gated"):
            jobs[name] = at[name]
        linears["x"] = at["normed"], at["attended"], at["normed"], at["gated"]
        linears["scratch"] = self._scratch.data_ptr()
        for number in range(len(self._layers)):
            before, after = self._places(number), self._places(number + 1)
            jobs["x"][number], jobs["before"][number] = at[before[0]], at[before[1]]
            jobs["residual"][number] = at[after[1]]
            linears["out"][number] = at["qkv"], at["projected"], at["gate_up"], at[after[0]]
        jobs["before"][0] = 0

    def _make_program(self, attention: tuple[Any, ...]) -> Program:
        works = (norm_input, multiply_panel, place_token, *attention)
        works += (multiply_panel, norm_attended, multiply_panel, gate_row, multiply_panel)
        program = self._program = Program(*works * len(self._layers))
        argument = program.argument.reshape(-1, _PHASES)
        argument[:, _PER_TOKEN] = _addresses(self._jobs)[:, None]
        argument[:, _ATTENTION] = _addresses(self._attention)[:, None]
        argument[:, _PROJECTIONS] = _addresses(self._linears)
        return program


def _addresses(records: np.ndarray) -> np.ndarray:
    count = np.arange(records.size).reshape(records.shape)
    return records.ctypes.data + records.itemsize * count


def compile_stack(model: nn.Module) -> int:
    """Let the decoder layers of a packed model run as a program, if all of them can.

    Args:
        model: a loaded SGLang model that :func:`.packed_linear.pack_model` has seen.

    Returns:
        The number of such layers.
    """
    layers = stack_of(model)
    if not layers or not all(map(_in_panels, layers)):
        return 0
    inner: Any = model.model
    object.__setattr__(inner, "forward", _forward_of(inner, DecoderStack(layers)))
    return len(layers)


def stack_of(model: nn.Module) -> list[Any]:
    """The model's decoder layers, if a program can compute all of them once they are packed."""
    from sglang.srt.models.llama import LlamaModel

    inner: Any = getattr(model, "model", None)
    if type(inner) is not LlamaModel:
        return []
    whole = inner.pp_group.is_first_rank and inner.pp_group.is_last_rank
    layers = list(inner.layers)
    return layers if whole and all(map(compiles, layers)) else []


def _forward_of(model: Any, stack: DecoderStack) -> Callable[..., Any]:
    """``LlamaModel.forward`` that runs ``stack`` where it can."""
    from sglang.srt.model_executor.forward_context import get_attn_backend

    plain = model.forward

    def forward(
        input_ids: Tensor,
        positions: Tensor,
        forward_batch: Any,
        input_embeds: Tensor | None = None,
        pp_proxy_tensors: Any = None,
    ) -> Any:
        backend, slots = get_attn_backend(), forward_batch.out_cache_loc
        computes = getattr(backend, "computes_layers", None)
        if computes is None or not computes(forward_batch) or model.layers_to_capture:
            return plain(input_ids, positions, forward_batch, input_embeds, pp_proxy_tensors)
        hidden = model.embed_tokens(input_ids) if input_embeds is None else input_embeds
        if not stack.serves(hidden, positions, slots):
            return plain(input_ids, positions, forward_batch, hidden, pp_proxy_tensors)
        out, residual = stack.run(hidden, positions, slots, backend)
        return model.norm(out, residual)[0]

    return forward


def compiles(layer: nn.Module) -> bool:
    """Whether the phases compute this layer: SGLang's own classes, exactly, in a form they know."""
    from sglang.srt.layers.activation import SiluAndMul
    from sglang.srt.layers.layernorm import RMSNorm
    from sglang.srt.models.llama import LlamaAttention, LlamaDecoderLayer, LlamaMLP

    if type(layer) is not LlamaDecoderLayer:
        return False
    attention, mlp = layer.self_attn, layer.mlp
    norms = (layer.input_layernorm, layer.post_attention_layernorm)
    return (
        type(attention) is LlamaAttention
        and type(mlp) is LlamaMLP
        and type(mlp.act_fn) is SiluAndMul
        and all(type(norm) is RMSNorm and _plain_norm(norm) for norm in norms)
        and all(linear.bias is None and linear.tp_size == 1 for linear in _projections(layer))
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


def _projections(layer: Any) -> tuple[Any, ...]:
    """In the order of their phases."""
    attention, mlp = layer.self_attn, layer.mlp
    return attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj


def _in_panels(layer: Any) -> bool:
    methods = [projection.quant_method for projection in _projections(layer)]
    return all(isinstance(getattr(m, "aspire_packed", None), PanelLinear) for m in methods)


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
