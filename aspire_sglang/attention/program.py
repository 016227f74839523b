"""Phases of work for a team of threads, in one parallel region.

A phase is a compiled function and a number of items. Each thread takes the next item until none is
left, and goes on to the next phase when all are done. So work of any shape is shared out evenly,
and nobody waits for a thread that comes late: other processes may hold one back for a time slice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import carray, cfunc, from_dtype, types

from aspire_sglang.attention.openmp import run_on_all_threads
from aspire_sglang.attention.simd import (
    call_work,
    count_done,
    fetch_add,
    pause,
    read_counter,
    records,
)

_LINE = 64
#: One phase; each counter has a cache line of its own.
PHASE = np.dtype(
    {
        "names": ["work", "argument", "items", "taken", "done"],
        "formats": [np.int64] * 5,
        "offsets": [0, 8, 16, _LINE, 2 * _LINE],
        "itemsize": 3 * _LINE,
    }
)
#: What the threads are called with.
_PROGRAM = np.dtype([("phases", np.int64), ("count", np.int64), ("threads", np.int64)])
_phases = records(PHASE)


@cfunc(types.void(types.CPointer(from_dtype(_PROGRAM))))
def _run(pointer):
    program = carray(pointer, 1)[0]
    thread = fetch_add(program.threads, 1)
    for number in range(program.count):
        address = program.phases + 3 * _LINE * number
        phase = carray(_phases(address), 1)[0]
        mine = 0
        item = fetch_add(address + _LINE, 1)
        while item < phase.items:
            call_work(phase.work, phase.argument, item, thread)
            mine += 1
            item = fetch_add(address + _LINE, 1)
        count_done(address + 2 * _LINE, mine)
        while read_counter(address + 2 * _LINE) < phase.items:
            pause()


def work(function: Callable[[Any, Any, Any], None]) -> Any:
    """Compile ``function(argument, item, thread)``, three int64, as the work of a phase.

    ``thread`` numbers the threads of a call from 0, for memory of their own.

    Returns:
        A Numba ``cfunc``; its ``address`` is what a phase is set to.
    """
    return cfunc(types.void(types.int64, types.int64, types.int64), error_model="numpy")(function)


class Program:
    """Phases that run one after another.

    Args:
        works: one function per phase, made by :func:`work`.

    Attributes:
        argument: int64 ``[phases]``: what each phase's work is called with, an address.
        items: int64 ``[phases]``: how many items each has.
    """

    def __init__(self, *works: Any) -> None:
        self._works = works  # compiled code lives as long as they do
        memory = np.zeros(len(works) * PHASE.itemsize + _LINE, np.uint8)
        start = -memory.ctypes.data % _LINE
        phases = memory[start : start + len(works) * PHASE.itemsize].view(PHASE)
        phases["work"] = [function.address for function in works]
        self._memory = memory
        self._counters = phases.view(np.int64).reshape(len(works), -1)[:, _LINE // 8 :]
        self._phases = phases
        self.argument = phases["argument"]
        self.items = phases["items"]
        self._threads = np.zeros(1, np.int64)
        self._program = np.zeros(1, _PROGRAM)
        self._program["threads"] = self._threads.ctypes.data
        self._address = self._program.ctypes.data

    def run(self, first: int = 0, stop: int | None = None) -> None:
        """Run the phases ``first .. stop`` on PyTorch's threads and wait for the last.

        Raises:
            RuntimeError: the process has no OpenMP runtime.
        """
        stop = len(self._works) if stop is None else stop
        self._counters[first:stop] = 0
        self._threads[0] = 0
        self._program["phases"] = self._phases.ctypes.data + first * PHASE.itemsize
        self._program["count"] = stop - first
        run_on_all_threads(_run.address, self._address)
