"""Shorter forms of float32 weights in panels, from which every value is had back exactly.

Few rows wait for weights to come from memory. Weights of a float32 model are often short numbers:
published in bfloat16, or unpacked from a file of small codes (GGUF's ``Q4_1`` or ``Q8_0``), where
32 neighbours are ``low + code * step``. A panel then holds the short numbers, a half or a third of
the bytes, and a chunk of it is expanded just before it is multiplied. Whether a form fits is found
out from the values themselves, all of them: nothing is rounded.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor

from aspire_sglang.attention.simd import (
    LANES,
    fma,
    load,
    load_bfloat16,
    load_uint8,
    prefetch,
    store,
)
from aspire_sglang.cpu_platform import huge_pages

#: Output columns of a panel: two vectors.
PANEL = 2 * LANES
#: Inputs whose weights share a lowest value and a step.
BLOCK = 32

#: Forms, see :func:`lay_out`.
FLOAT, BFLOAT, CODES = range(3)
NAMES = {FLOAT: "float32", BFLOAT: "bfloat16", CODES: "codes"}

# A block of codes: PANEL steps, PANEL lowest values, then BLOCK rows of PANEL bytes.
_CODE_BYTES = 8 * PANEL + BLOCK * PANEL
# Numbers of float16, and their products with small integers, are whole multiples of this.
_UNIT = 2.0**-24
_MOST_CODE = 255

_compiled = njit(error_model="numpy", nogil=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)


def lay_out(weight: Tensor) -> tuple[int, Tensor]:
    """A weight in panels, in the shortest form that fits it.

    Args:
        weight: ``[columns, width]`` float32 on the CPU.

    Returns:
        The form, and a tensor whose first dimension is the panel, columns behind the last being
        zero: ``FLOAT``: float32 ``[panels, width, PANEL]``; ``BFLOAT``: the same of bfloat16;
        ``CODES``: uint8 ``[panels, width / BLOCK, bytes of a block]``.
    """
    columns, width = weight.shape
    if width % BLOCK == 0:
        codes = torch.empty(columns, width, dtype=torch.uint8)
        scales = torch.empty(columns, width // BLOCK, 2)
        arrays = (each.numpy() for each in (weight, codes, scales))
        if find_codes(*arrays):
            return CODES, _code_panels(codes, scales)
    bits = weight.contiguous().view(torch.int32)
    short = not bool((bits & 0xFFFF).any())
    return (BFLOAT, _panels(weight.bfloat16())) if short else (FLOAT, _panels(weight))


def _panels(weight: Tensor) -> Tensor:
    """``[columns, width]`` as ``[panels, width, PANEL]``, of the same dtype."""
    columns, width = weight.shape
    panels = huge_pages.zeros((-(-columns // PANEL), width, PANEL), weight.dtype)
    whole, rest = divmod(columns, PANEL)
    panels[:whole] = weight[: whole * PANEL].reshape(whole, PANEL, width).transpose(1, 2)
    if rest:
        panels[whole, :, :rest] = weight[whole * PANEL :].T
    return panels


def _code_panels(codes: Tensor, scales: Tensor) -> Tensor:
    columns, width = codes.shape
    panels, blocks = -(-columns // PANEL), width // BLOCK
    out = huge_pages.zeros((panels, blocks, _CODE_BYTES), torch.uint8)
    by_block = _panels(codes).view(panels, blocks, BLOCK * PANEL)
    out[..., 8 * PANEL :] = by_block
    for place in range(2):
        part = _panels(scales[..., place].contiguous())
        out[..., 4 * place * PANEL : 4 * (place + 1) * PANEL] = part.view(torch.uint8)
    return out


@njit(error_model="numpy", nogil=True)
def find_codes(weight, codes, scales):
    """Write each block of 32 neighbours as ``low + code * step``, if all of them are.

    Args:
        weight: float32 ``[columns, width]``, ``width`` a multiple of ``BLOCK``.
        codes: uint8, like ``weight``; written.
        scales: float32 ``[columns, width / BLOCK, 2]``: step and lowest value; written.

    Returns:
        Whether every weight is ``low + code * step``, exactly, in float32 with one rounding.
    """
    whole = np.empty(BLOCK, np.float64)
    for column in range(weight.shape[0]):
        for block in range(weight.shape[1] // BLOCK):
            first = block * BLOCK
            low = np.inf
            for i in range(BLOCK):
                # Whole numbers below 2^53, so the arithmetic below is exact.
                value = np.float64(weight[column, first + i]) / _UNIT
                if not abs(value) < 2.0**48 or value != np.rint(value):
                    return False
                whole[i] = value
                low = min(low, value)
            step = 0.0
            for i in range(BLOCK):
                step = _common(step, whole[i] - low)
            step = max(step, 1.0)
            scales[column, block, 0] = step * _UNIT
            scales[column, block, 1] = low * _UNIT
            if np.float64(scales[column, block, 0]) != step * _UNIT:
                return False
            for i in range(BLOCK):
                code = np.rint((whole[i] - low) / step)
                if code > _MOST_CODE:
                    return False
                codes[column, first + i] = np.uint8(code)
    return True


@njit(error_model="numpy", nogil=True)
def _common(a, b):
    """Greatest common divisor of two whole numbers, 0 for two zeros."""
    # Nearly always the divisor found so far: no loop then.
    if a > 0 and a * np.rint(b / a) == b:
        return a
    while b > 0:
        a, b = b, a - b * np.floor(a / b)
    return a


def panel_bytes(form: int, width: int) -> int:
    """Bytes of a panel of ``width`` inputs."""
    return {
        FLOAT: 4 * width * PANEL,
        BFLOAT: 2 * width * PANEL,
        CODES: width // BLOCK * _CODE_BYTES,
    }[form]


@_compiled
def expand(form, panel, begin, inputs, target):
    """Write the float32 weights of some inputs of a panel, ``[inputs, PANEL]``.

    Args:
        form: ``BFLOAT`` or ``CODES``.
        panel: address of a panel.
        begin, inputs: the first input and how many; with ``CODES`` multiples of ``BLOCK``.
        target: address to write at.
    """
    if form == BFLOAT:
        source = panel + 2 * begin * PANEL
        for at in range(0, inputs * PANEL, LANES):
            prefetch(source + 2 * inputs * PANEL, 2 * at)
            store(target, at, load_bfloat16(source, at))
        return
    for block in range(inputs // BLOCK):
        source = panel + (begin // BLOCK + block) * _CODE_BYTES
        codes = source + 8 * PANEL
        ahead = codes + inputs // BLOCK * _CODE_BYTES
        out = target + 4 * block * BLOCK * PANEL
        for half in range(0, PANEL, LANES):
            step, low = load(source, half), load(source, PANEL + half)
            for i in range(0, BLOCK, 2):
                at = i * PANEL + half
                prefetch(ahead, at)
                store(out, at, fma(load_uint8(codes, at), step, low))
                at += PANEL
                store(out, at, fma(load_uint8(codes, at), step, low))


def describe(forms: list[Any]) -> str:
    """``"codes 211"``: how many of the given forms there are of each kind."""
    return ", ".join(f"{NAMES[form]} {forms.count(form)}" for form in sorted(set(forms)))
