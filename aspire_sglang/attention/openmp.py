"""Compiled functions on PyTorch's own threads.

PyTorch's operators run on a team of OpenMP threads, which wait for the next one by spinning. Other
threads beside them would fight for the cores, so kernels of ours run on the same team: the OpenMP
runtime that PyTorch has loaded starts them as if a compiler had made the parallel region.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path

import torch

#: Entry of a parallel region in the ABI of GNU OpenMP, which LLVM's and Intel's runtimes have too.
_ENTRY = "GOMP_parallel"


def _runtimes() -> list[str]:
    """OpenMP libraries of this process, PyTorch's own first."""
    maps = Path("/proc/self/maps")
    if not maps.exists():  # not Linux
        return []
    entries = [line.split(maxsplit=5) for line in maps.read_text().splitlines()]
    paths = {entry[5] for entry in entries if len(entry) == 6}
    found = [path for path in paths if "omp" in Path(path).name and ".so" in Path(path).name]
    home = str(Path(torch.__file__).parent)
    return sorted(found, key=lambda path: (not path.startswith(home), path))


@functools.cache
def parallel_region() -> Callable[..., None]:
    """The runtime's function that starts a parallel region.

    Raises:
        RuntimeError: the process has no OpenMP runtime.
    """
    for path in _runtimes():
        entry = getattr(ctypes.CDLL(path), _ENTRY, None)
        if entry is not None:
            entry.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
            entry.restype = None
            return entry
    raise RuntimeError(
        "PyTorch's OpenMP runtime was not found in this process: the attention backend 'aspire' "
        "needs a PyTorch built with OpenMP, as on PyPI. Use --attention-backend torch_native."
    )


def run_on_all_threads(function: int, argument: int) -> None:
    """Call ``void function(void *argument)`` once on every thread of PyTorch's team, and wait.

    Args:
        function: address of a C function that needs no interpreter; it shares the work out itself.
        argument: address handed to every call.

    Raises:
        RuntimeError: the process has no OpenMP runtime.
    """
    parallel_region()(function, argument, torch.get_num_threads(), 0)
