"""Tensors in huge pages, for what every step reads from beginning to end.

With pages of 4 KiB a pass over a few hundred MB of weights, or over a KV pool, is a page-table walk
every 64 cache lines, and the hardware's prefetchers stop at each page. Most systems give huge pages
only to memory that asks for them.
"""

from __future__ import annotations

import math
import mmap

import numpy as np
import torch
from torch import Tensor

_HUGE = 2 << 20


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A contiguous tensor of zeros on the CPU, in huge pages where the system has them.

    Memory is taken when it is first touched, in steps of 2 MiB.
    """
    size = math.prod(shape) * dtype.itemsize
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is None or size < _HUGE:
        return torch.zeros(shape, dtype=dtype)
    memory = mmap.mmap(-1, size + _HUGE)
    memory.madvise(advice)
    start = -np.frombuffer(memory, np.uint8).ctypes.data % _HUGE
    flat = torch.frombuffer(memory, dtype=dtype, count=math.prod(shape), offset=start)
    return flat.view(shape)
