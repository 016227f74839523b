"""Linear layers with weights laid out for few rows, and their installation in an SGLang model.

Two layouts compete: oneDNN's (:mod:`.onednn_linear`) and ours (:mod:`.panel_linear`); which one is
fastest depends on the processor, so it is measured. The plain weight stays where it is (weight
updates and tied embeddings need it): this doubles the memory of the weights.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aspire_sglang.cpu_platform.onednn_linear import OneDnnLinear
from aspire_sglang.cpu_platform.panel_linear import PanelLinear

Packed = OneDnnLinear | PanelLinear
_NAMES: dict[type[Packed], str] = {OneDnnLinear: "oneDNN", PanelLinear: "panels"}


# Eight rows of SmolLM2-135M on two cores without AVX-512: linears take 35 ms of a step, and a
# program of all layers saves 50 ms between operators.
_STACK_GAIN = 1.5


def layouts(dtype: torch.dtype) -> list[type[Packed]]:
    """The layouts that this machine has for weights of ``dtype``."""
    return [layout for layout in _NAMES if layout.supports(dtype)]


def pack_model(model: nn.Module, layout: type[Packed]) -> int:
    """Let an SGLang model compute its unquantised linears and its lm_head from packed weights.

    Every layer whose method is exactly SGLang's unquantised one, with a weight on the CPU of a
    dtype that the layout supports, gets its own method object that answers ``apply`` from the
    packed weight and inherits everything else. Other layers stay as they are. Calling it again
    packs what is new and renews what is packed. Reloading through SGLang's loader renews by
    itself; after any other in-place change of weights call :func:`repack`.

    Args:
        model: a loaded model, in inference use only.
        layout: of the packed weights.

    Returns:
        The number of packed layers.
    """
    from sglang.srt.layers.quantization.unquant import (
        UnquantizedEmbeddingMethod,
        UnquantizedLinearMethod,
    )

    packed_linear, packed_head = _method_classes()
    for module in model.modules():
        if type(getattr(module, "quant_method", None)) is UnquantizedLinearMethod:
            _install(module, packed_linear, layout)
        head = getattr(module, "lm_head", None)
        if (
            type(getattr(head, "quant_method", None)) is UnquantizedEmbeddingMethod
            and isinstance(head, nn.Module)
            and _plain_logits(module)
        ):
            _install(head, packed_head, layout)
    return repack(model)


def repack(model: nn.Module) -> int:
    """Pack the current weights of every packed layer again; idempotent.

    Args:
        model: a model that :func:`pack_model` has seen.

    Returns:
        The number of packed layers.
    """
    count = 0
    for module in model.modules():
        renew = getattr(getattr(module, "quant_method", None), "aspire_repack", None)
        if renew is not None:
            renew(module)
            count += 1
    return count


def packed_weights(model: nn.Module) -> list[Packed]:
    """The packed copies that a model's layers compute from now."""
    methods = (getattr(module, "quant_method", None) for module in model.modules())
    packed = (getattr(method, "aspire_packed", None) for method in methods)
    return [each for each in packed if each is not None]


def _install(layer: nn.Module, method: type, layout: type[Packed]) -> None:
    """Replace a layer's method by a packed one where its weight can be packed."""
    from sglang.srt.utils import use_intel_amx_backend

    weight = getattr(layer, "weight", None)
    if (
        isinstance(weight, Tensor)
        and type(weight.data) is Tensor
        and weight.dim() == 2
        and weight.device.type == "cpu"
        and layout.supports(weight.dtype)
        and weight.layout == torch.strided
        and not use_intel_amx_backend(layer)
    ):
        installed = method()
        installed.aspire_layout = layout
        object.__setattr__(layer, "quant_method", installed)


def _plain_logits(owner: nn.Module) -> bool:
    """Whether the logits of this model are a plain product in the weight's dtype."""
    processor = getattr(owner, "logits_processor", None)
    return (
        processor is not None
        and not getattr(processor, "use_fp32_lm_head", True)
        and getattr(processor, "rl_on_policy_target", None) is None
    )


@lru_cache(maxsize=1)
def _method_classes() -> tuple[type, type]:
    """Packed variants of SGLang's unquantised linear and embedding methods.

    Subclasses, so that ``isinstance`` tests elsewhere still hold. The embedding one has another
    class name on purpose: the logits processor multiplies by the plain weight itself for the
    class names it knows as unquantised, and calls ``apply`` for any other.
    """
    from sglang.srt.layers.quantization.unquant import (
        UnquantizedEmbeddingMethod,
        UnquantizedLinearMethod,
    )

    class _Packed:
        aspire_layout: type[Packed]
        aspire_packed: Packed | None = None

        def aspire_repack(self, layer: nn.Module) -> None:
            self.aspire_packed = None
            self.aspire_packed = self.aspire_layout(layer.weight.data)

        def aspire_apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None) -> Tensor | None:
            packed = self.aspire_packed
            if packed is None or x.dtype != packed.dtype or not packed.matches(layer.weight):
                return None
            return packed(x, bias)

    class AspirePackedLinearMethod(_Packed, UnquantizedLinearMethod):
        def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
            out = self.aspire_apply(layer, x, bias)
            return super().apply(layer, x, bias) if out is None else out

        def process_weights_after_loading(self, layer: nn.Module) -> None:
            super().process_weights_after_loading(layer)
            self.aspire_repack(layer)

    class AspirePackedEmbeddingMethod(_Packed, UnquantizedEmbeddingMethod):
        def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
            x = x.to(layer.weight.dtype)
            out = self.aspire_apply(layer, x, bias)
            return F.linear(x, layer.weight, bias) if out is None else out

        def process_weights_after_loading(self, layer: nn.Module) -> None:
            super().process_weights_after_loading(layer)
            self.aspire_repack(layer)

    return AspirePackedLinearMethod, AspirePackedEmbeddingMethod


@dataclass(frozen=True)
class PackingReport:
    """Times of one linear on this machine, plain and in every layout.

    Attributes:
        dtype: dtype of the weight.
        rows: rows per call.
        plain_us: microseconds of the fastest call of ``F.linear``.
        packed_us: the same of every layout that supports the dtype.
    """

    dtype: torch.dtype
    rows: int
    plain_us: float
    packed_us: dict[type[Packed], float]

    def choice(self, *, stack: bool = False) -> type[Packed] | None:
        """The layout to use, None for plain weights.

        It is the fastest, if it is a tenth faster than plain weights: less is not worth the memory.

        Args:
            stack: with weights in panels all layers can be one program (:mod:`.decoder_stack`),
                which saves more than panels of two thirds of the fastest speed lose.
        """
        best = min((None, *self.packed_us), key=self._time)
        panels = PanelLinear if PanelLinear in self.packed_us else None
        if stack and panels and self._time(panels) < _STACK_GAIN * self._time(best):
            return panels
        return best

    def _time(self, layout: type[Packed] | None) -> float:
        return 0.9 * self.plain_us if layout is None else self.packed_us[layout]

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        if not self.packed_us:
            return f"no layout for {dtype} weights on this machine"
        times = {"plain": self.plain_us, **{_NAMES[kind]: t for kind, t in self.packed_us.items()}}
        listed = ", ".join(f"{name} {time:.0f} us" for name, time in times.items())
        return f"{dtype} linear of {self.rows} rows: {listed}"


def measure_packing(
    dtype: torch.dtype = torch.float32,
    rows: int = 8,
    shape: tuple[int, int] = (1536, 1024),
    budget_s: float = 2.0,
) -> PackingReport:
    """Time linears plain and in every layout, alternating, over weights too many for the caches.

    Args:
        dtype: of the weights.
        rows: rows per call.
        shape: ``(out_features, in_features)`` of the weights.
        budget_s: stop after about this many seconds; a quiet machine needs a tenth of one.
    """
    kinds = layouts(dtype)
    if not kinds:
        return PackingReport(dtype, rows, 0.0, {})
    start = time.perf_counter()
    # Random, so that they have no short form, which panels of the model's weights may have.
    random = torch.Generator().manual_seed(0)
    weights = [torch.randn(shape, generator=random).to(dtype) for _ in range(12)]
    packed = {kind: [kind(weight) for weight in weights] for kind in kinds}
    x = torch.full((rows, shape[1]), 0.5, dtype=dtype)
    # A busy start must not decide for the server's whole life. Other processes only ever add to a
    # time, most of all to calls that wait for a second thread, so the fastest call is the truth.
    plain_us = float("inf")
    packed_us = dict.fromkeys(kinds, float("inf"))
    with torch.inference_mode():
        for _ in range(20):
            for index, weight in enumerate(weights):
                begin = time.perf_counter()
                F.linear(x, weight)
                plain_us = min(plain_us, (time.perf_counter() - begin) * 1e6)
                for kind in kinds:
                    begin = time.perf_counter()
                    packed[kind][index](x)
                    took = (time.perf_counter() - begin) * 1e6
                    packed_us[kind] = min(packed_us[kind], took)
            if time.perf_counter() - start > budget_s:
                break
    return PackingReport(dtype, rows, plain_us, packed_us)
