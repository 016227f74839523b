"""Linear layers for few rows: a float32 weight laid out in panels, read once per call.

A decode or verify step multiplies a handful of rows by every weight, so reading the weight is the
floor. A panel (:mod:`.panel_forms`) holds two vectors of output columns for every input value, one
behind the other:
a thread walks through it once, in the order it lies in memory, while a block of rows by columns
is summed in registers (the inner kernel of BLIS: Van Zee and van de Geijn, 2015). PyTorch's own
products reach a third of that speed for 8 rows without AVX-512.

An output is the same, bit for bit, whatever other rows are computed beside it: every sum runs over
the inputs in the same order.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import carray, njit
from torch import Tensor

from aspire_sglang.attention.openmp import parallel_region
from aspire_sglang.attention.program import Program, work
from aspire_sglang.attention.simd import LANES, get, load, put, records, splat, store
from aspire_sglang.attention.tiles import product_tile
from aspire_sglang.cpu_platform.panel_forms import FLOAT, PANEL, expand, lay_out, panel_bytes
from aspire_sglang.cpu_platform.weight_copy import WeightCopy

# Rows of a register tile. Sixteen registers (AVX2) hold 6 x 2 sums, two columns and a value.
_TILE = 8 if LANES == 16 else 6
# Rows that pass over a panel before the next panel's turn; their inputs stay in the second cache.
_ROWS = 16 * _TILE
# Inputs that all rows pass over before the next ones' turn, for which memory is asked meanwhile: a
# panel then comes from memory while its rows are computed, not before (1.3 to 1.6 times the speed
# for 8 to 17 rows on one Zen 3 core; half and twice the length are slower).
_CHUNK = 64
#: float32 values of scratch memory per thread: sums, a row of ones, an expanded chunk.
SCRATCH = (_ROWS + 1 + _CHUNK) * PANEL

#: One call of the kernel.
JOB = np.dtype(
    [
        ("x", np.int64),  # float32 [rows, width]
        ("out", np.int64),  # float32 [rows, columns]
        ("panels", np.int64),  # the weight, see panel_forms.lay_out
        ("form", np.int64),
        ("panel_bytes", np.int64),
        ("rows", np.int64),
        ("width", np.int64),
        ("columns", np.int64),
        ("scratch", np.int64),  # float32 [threads, SCRATCH]
    ]
)

_jobs = records(JOB)
_compiled = njit(error_model="numpy", nogil=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)


def _tiles(rows: int, from_memory: bool) -> Any:
    """A function for register tiles of 1 to ``rows`` rows, of weights that come from memory or have
    been expanded."""
    # One or two rows wait for memory anyway; the requests would only be in the way.
    ahead = _CHUNK if from_memory and rows > 2 else 0
    tile = product_tile(rows, 2, PANEL, accumulate=True, ahead=ahead)
    if rows == 1:

        @_compiled
        def one(count, sums, x, width, panel, inputs, ones):
            tile(sums, x, width, 1, panel, inputs, ones)

        return one
    fewer = _tiles(rows - 1, from_memory)

    @_compiled
    def some(count, sums, x, width, panel, inputs, ones):
        if count == rows:
            tile(sums, x, width, 1, panel, inputs, ones)
        else:
            fewer(count, sums, x, width, panel, inputs, ones)

    return some


_product, _expanded_product = _tiles(_TILE, True), _tiles(_TILE, False)


def num_items(columns: int, rows: int) -> int:
    """Items of a phase of :func:`multiply_panel`."""
    return -(-columns // PANEL) * -(-rows // _ROWS)


@work
def multiply_panel(argument, item, thread):
    """The work of a phase: some rows by one panel; its argument is the address of a ``JOB``."""
    job = carray(_jobs(argument), 1)[0]
    scratch = job.scratch + 4 * thread * SCRATCH
    panels = -(-job.columns // PANEL)
    first = item // panels * _ROWS
    stop = min(first + _ROWS, job.rows)
    panel = item % panels
    weight = job.panels + panel * job.panel_bytes
    column = panel * PANEL
    valid = min(PANEL, job.columns - column)
    ones = scratch + 4 * _ROWS * PANEL
    expanded = ones + 4 * PANEL
    for at in range(0, PANEL, LANES):
        store(ones, at, splat(np.float32(1)))
    for at in range(0, (stop - first) * PANEL, LANES):
        store(scratch, at, splat(np.float32(0)))
    # Tiles of about equal size: few rows in a tile leave the arithmetic units waiting.
    blocks = -(-(stop - first) // _TILE)
    for begin in range(0, job.width, _CHUNK):
        inputs = min(_CHUNK, job.width - begin)
        if job.form != FLOAT:
            expand(job.form, weight, begin, inputs, expanded)
        for block in range(blocks):
            row = (stop - first) * block // blocks
            count = (stop - first) * (block + 1) // blocks - row
            sums = scratch + 4 * row * PANEL
            x = job.x + 4 * ((first + row) * job.width + begin)
            if job.form == FLOAT:
                chunk = weight + 4 * begin * PANEL
                _product(count, sums, x, job.width, chunk, inputs, ones)
            else:
                _expanded_product(count, sums, x, job.width, expanded, inputs, ones)
    for row in range(stop - first):
        at = (first + row) * job.columns + column
        if valid == PANEL:
            store(job.out, at, load(scratch, row * PANEL))
            store(job.out, at + LANES, load(scratch, row * PANEL + LANES))
        else:
            for j in range(valid):
                put(job.out, at + j, get(scratch, row * PANEL + j))


class PanelLinear(WeightCopy):
    """A float32 weight in panels, callable like ``F.linear(x, weight, bias)``.

    Attributes:
        shape: ``(out_features, in_features)``.
        dtype: float32.
        form: in which its panels are kept, see :mod:`.panel_forms`.
    """

    def __init__(self, weight: Tensor) -> None:
        """Lay out ``weight``: ``[out_features, in_features]``, float32, on the CPU.

        Raises:
            ValueError: another kind of tensor.
            RuntimeError: the process has no OpenMP runtime to share the work out.
        """
        if weight.dim() != 2 or weight.dtype != torch.float32 or weight.device.type != "cpu":
            raise ValueError(
                f"cannot lay out a {weight.dtype} weight {tuple(weight.shape)} on {weight.device}"
            )
        parallel_region()  # better missed now than in the first forward
        super().__init__(weight)
        self.form, self._panels = lay_out(weight.detach())
        self._scratch = torch.empty(0)
        self._job = job = np.zeros(1, JOB)
        self.write_job(job)
        self._program = Program(multiply_panel)
        self._program.argument[0] = job.ctypes.data

    def write_job(self, job: np.ndarray) -> None:
        """Write the weight's part of a ``JOB`` record."""
        job["panels"], job["form"] = self._panels.data_ptr(), self.form
        job["panel_bytes"] = panel_bytes(self.form, self.shape[1])
        job["columns"], job["width"] = self.shape

    @staticmethod
    def supports(dtype: torch.dtype) -> bool:
        """Whether weights of ``dtype`` can be laid out."""
        return dtype == torch.float32

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """``x @ weight.T + bias``.

        Args:
            x: float32 ``[..., in_features]``; any number of rows, 0 included.
            bias: ``[out_features]`` or None.

        Returns:
            ``[..., out_features]``.

        Raises:
            ValueError: ``x`` has another dtype or width.
        """
        self._check_input(x)
        out = x.new_empty(*x.shape[:-1], self.shape[0])
        if out.numel() == 0:
            return out
        rows = x.reshape(-1, self.shape[1]).contiguous()
        threads = torch.get_num_threads()
        if self._scratch.shape[0] != threads:
            self._scratch = torch.empty(threads, SCRATCH)
        job = self._job
        job["x"], job["out"], job["rows"] = rows.data_ptr(), out.data_ptr(), rows.shape[0]
        job["scratch"] = self._scratch.data_ptr()
        self._program.items[0] = num_items(self.shape[0], rows.shape[0])
        self._program.run()
        return out if bias is None else out.add_(bias)
