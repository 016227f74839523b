"""Weights of linear layers in oneDNN's own layout.

``F.linear`` in float32 goes to MKL, and in bfloat16 to oneDNN with the weight reordered on every
call; both are slow for the few rows of a decode or verify step. Packing a weight once into the
layout that oneDNN's kernel wants makes such steps up to three times faster, most so with AVX-512.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from aspire_sglang.cpu_platform.weight_copy import WeightCopy

_DTYPES = (torch.float32, torch.bfloat16)
#: From this many outputs a float32 weight (an lm_head) is packed for about 16 rows. Smaller ones
#: are fastest, by up to a factor of two at 8 to 24 rows, in the layout oneDNN picks unasked.
_WIDE = 16_384


@lru_cache
def onednn_available(dtype: torch.dtype = torch.float32) -> bool:
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


class OneDnnLinear(WeightCopy):
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
        if not onednn_available(weight.dtype):
            raise RuntimeError(f"oneDNN cannot pack {weight.dtype} weights on this machine")
        super().__init__(weight)
        rows = 16 if weight.dtype == torch.float32 and weight.shape[0] >= _WIDE else None
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), rows)

    @staticmethod
    def supports(dtype: torch.dtype) -> bool:
        """Whether weights of ``dtype`` can be packed on this machine."""
        return onednn_available(dtype)

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
        self._check_input(x)
        if x.numel() == 0:
            return x.new_empty(*x.shape[:-1], self.shape[0])
        rows = x.reshape(-1, self.shape[1]).contiguous()
        out = torch.ops.mkldnn._linear_pointwise.default(rows, self._packed, bias, "none", [], "")
        return out.view(*x.shape[:-1], self.shape[0])
