"""Linear layers with weights pre-packed for oneDNN, and their installation in an SGLang model.

``F.linear`` in float32 goes to MKL, and in bfloat16 to oneDNN with the weight reordered on every
call; both are slow for the few rows of a decode or verify step. Packing a weight once into the
layout that oneDNN's kernel wants makes such steps two to three times faster. The plain weight
stays where it is (weight updates and tied embeddings need it), so packing doubles the memory of
the packed weights.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_DTYPES = (torch.float32, torch.bfloat16)
#: From this many outputs a float32 weight (an lm_head) is packed for about 16 rows. Smaller ones
#: are fastest, by up to a factor of two at 8 to 24 rows, in the layout oneDNN picks unasked.
_WIDE = 16_384


@lru_cache
def packing_available(dtype: torch.dtype = torch.float32) -> bool:
    """Whether PyTorch and this processor can pack weights of ``dtype``.

    PyTorch may lack oneDNN's operators, and refuses bfloat16 on processors without AVX-512.
    """
    ops = torch.ops.mkldnn
    if not (
        dtype in _DTYPES
        and torch.backends.mkldnn.is_available()
        and hasattr(ops, "_reorder_linear_weight")
        and hasattr(ops, "_linear_pointwise")
    ):
        return False
    try:
        ops._reorder_linear_weight(torch.zeros(16, 16, dtype=dtype), None)
    except RuntimeError:
        return False
    return True


class PackedLinear:
    """A weight in oneDNN's own layout, callable like ``F.linear(x, weight, bias)``.

    Attributes:
        shape: ``(out_features, in_features)``.
        dtype: float32 or bfloat16.
    """

    def __init__(self, weight: Tensor) -> None:
        """Pack ``weight``: ``[out_features, in_features]``, float32 or bfloat16, on the CPU.

        Raises:
            ValueError: another kind of tensor.
            RuntimeError: oneDNN is not available.
        """
        if weight.dim() != 2 or weight.dtype not in _DTYPES or weight.device.type != "cpu":
            raise ValueError(
                f"cannot pack a {weight.dtype} weight {tuple(weight.shape)} on {weight.device}"
            )
        if not packing_available(weight.dtype):
            raise RuntimeError(f"oneDNN cannot pack {weight.dtype} weights on this machine")
        self.shape = (weight.shape[0], weight.shape[1])
        self.dtype = weight.dtype
        self._pointer = weight.data_ptr()
        rows = 16 if weight.dtype == torch.float32 and weight.shape[0] >= _WIDE else None
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), rows)

    def matches(self, weight: Tensor) -> bool:
        """Whether ``weight`` is the storage that was packed (its content may have changed)."""
        return (
            weight.data_ptr() == self._pointer
            and weight.dtype == self.dtype
            and weight.shape == self.shape
        )

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """``x @ weight.T + bias``.

        Args:
            x: ``[..., in_features]`` in the dtype of the weight; any number of rows, 0 included.
            bias: ``[out_features]`` or None.

        Returns:
            ``[..., out_features]``.

        Raises:
            ValueError: ``x`` has another dtype or width.
        """
        if x.dtype != self.dtype or x.shape[-1] != self.shape[1]:
            raise ValueError(f"input {x.dtype} {tuple(x.shape)} for {self.dtype} {self.shape}")
        if x.numel() == 0:
            return x.new_empty(*x.shape[:-1], self.shape[0])
        rows = x.reshape(-1, self.shape[1]).contiguous()
        out = torch.ops.mkldnn._linear_pointwise.default(rows, self._packed, bias, "none", [], "")
        return out.view(*x.shape[:-1], self.shape[0])


def pack_model(model: nn.Module) -> int:
    """Let an SGLang model compute its unquantised linears and its lm_head from packed weights.

    Every layer whose method is exactly SGLang's unquantised one, with a float32 or bfloat16
    weight on the CPU, gets its own method object that answers ``apply`` from the packed weight
    and inherits everything else. Other layers stay as they are. Calling it again packs what is
    new and renews what is packed. Reloading through SGLang's loader renews by itself; after any
    other in-place change of weights call :func:`repack`.

    Args:
        model: a loaded model, in inference use only.

    Returns:
        The number of packed layers; 0 where oneDNN is not available.
    """
    if not any(packing_available(dtype) for dtype in _DTYPES):
        return 0
    from sglang.srt.layers.quantization.unquant import (
        UnquantizedEmbeddingMethod,
        UnquantizedLinearMethod,
    )

    packed_linear, packed_head = _method_classes()
    for module in model.modules():
        if type(getattr(module, "quant_method", None)) is UnquantizedLinearMethod:
            _install(module, packed_linear)
        head = getattr(module, "lm_head", None)
        if (
            type(getattr(head, "quant_method", None)) is UnquantizedEmbeddingMethod
            and isinstance(head, nn.Module)
            and _plain_logits(module)
        ):
            _install(head, packed_head)
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


def _install(layer: nn.Module, method: type) -> None:
    """Replace a layer's method by a packed one where its weight can be packed."""
    from sglang.srt.utils import use_intel_amx_backend

    weight = getattr(layer, "weight", None)
    if (
        isinstance(weight, Tensor)
        and type(weight.data) is Tensor
        and weight.dim() == 2
        and weight.device.type == "cpu"
        and packing_available(weight.dtype)
        and weight.layout == torch.strided
        and not use_intel_amx_backend(layer)
    ):
        object.__setattr__(layer, "quant_method", method())


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
        aspire_packed: PackedLinear | None = None

        def aspire_repack(self, layer: nn.Module) -> None:
            self.aspire_packed = None
            self.aspire_packed = PackedLinear(layer.weight.data)

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
    """Times of one linear, plain and packed, on this machine.

    Attributes:
        dtype: dtype of the weight.
        rows: rows per call.
        plain_us, packed_us: microseconds of the fastest call; ``packed_us`` is infinite where
            packing is not available.
    """

    dtype: torch.dtype
    rows: int
    plain_us: float
    packed_us: float

    @property
    def pays(self) -> bool:
        """Packed is at least a tenth faster: less is not worth the memory."""
        return self.packed_us < 0.9 * self.plain_us

    def __str__(self) -> str:
        if math.isinf(self.packed_us):
            return f"oneDNN cannot pack {str(self.dtype).removeprefix('torch.')} here"
        return (
            f"{str(self.dtype).removeprefix('torch.')} linear of {self.rows} rows: "
            f"plain {self.plain_us:.0f} us, packed {self.packed_us:.0f} us"
        )


def measure_packing(
    dtype: torch.dtype = torch.float32,
    rows: int = 16,
    shape: tuple[int, int] = (1536, 1024),
    budget_s: float = 2.0,
) -> PackingReport:
    """Time plain against packed linears, alternating, over weights too many for the caches.

    Args:
        dtype: float32 or bfloat16.
        rows: rows per call.
        shape: ``(out_features, in_features)`` of the weights.
        budget_s: stop after about this many seconds; a quiet machine needs a tenth of one.
    """
    if not packing_available(dtype):
        return PackingReport(dtype, rows, 0.0, float("inf"))
    start = time.perf_counter()
    weights = [torch.full(shape, 0.01 * i, dtype=dtype) for i in range(12)]
    packed = [PackedLinear(weight) for weight in weights]
    x = torch.full((rows, shape[1]), 0.5, dtype=dtype)
    plain_us: list[float] = []
    packed_us: list[float] = []
    with torch.inference_mode():
        F.linear(x, weights[0])
        packed[0](x)
        for _ in range(20):
            for weight, pack in zip(weights, packed, strict=True):
                t0 = time.perf_counter()
                F.linear(x, weight)
                t1 = time.perf_counter()
                pack(x)
                t2 = time.perf_counter()
                plain_us.append((t1 - t0) * 1e6)
                packed_us.append((t2 - t1) * 1e6)
            if time.perf_counter() - start > budget_s:
                break
    # A busy start must not decide for the server's whole life. Other processes only ever add to a
    # time, most of all to calls that wait for a second thread, so the fastest call is the truth.
    return PackingReport(dtype, rows, min(plain_us), min(packed_us))
