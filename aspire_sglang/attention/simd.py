"""Vectors of float32 as a Numba type, so that kernels of the CPU path are written in Python.

Numba has no vector registers in its language and its loop vectorizer does not block products over
registers, which is most of the speed of an attention kernel. So a vector is a type of its own
here, with the few operations that the kernels need, each translated to one LLVM instruction or
intrinsic; :func:`product_tile` is the register-blocked product they are built around.

Memory is addressed by plain integers and an index in elements: nothing is checked, and callers
hand over only addresses of live tensors.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba import from_dtype
from numba.core import cgutils, types
from numba.extending import intrinsic, models, register_model

#: float32 values per vector, the width of the machine's registers where it has AVX-512.
LANES = 16 if llvm.get_host_cpu_features().get("avx512f") else 8
#: Score of a key that a query may not see; finite, so that no difference of scores is NaN.
HIDDEN = -1e30

_I16, _I32, _I64 = ir.IntType(16), ir.IntType(32), ir.IntType(64)
_F16, _F32 = ir.HalfType(), ir.FloatType()
_FLOATS, _INTS = ir.VectorType(_F32, LANES), ir.VectorType(_I32, LANES)
# 2^x on [-1/2, 1/2], relative error below 2e-8.
_EXP2 = (
    np.polynomial.Chebyshev.interpolate(np.exp2, 6, domain=[-0.5, 0.5])
    .convert(kind=np.polynomial.Polynomial)
    .coef
)


class VectorType(types.Type):
    """``LANES`` float32 values in a register."""

    def __init__(self) -> None:
        super().__init__(name=f"float32x{LANES}")


vector = VectorType()


@register_model(VectorType)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, _FLOATS)


def _operation(signature: Any) -> Callable[[Callable[..., Any]], Any]:
    """Make ``emit(builder, *values)`` a function that Numba code can call."""

    def decorate(emit: Callable[..., Any]) -> Any:
        def codegen(context: Any, builder: Any, _: Any, args: Any) -> Any:
            value = emit(builder, *args)
            return context.get_dummy_value() if signature.return_type == types.void else value

        def operation(typing: Any, *_: Any) -> Any:
            return signature, codegen

        functools.update_wrapper(operation, emit)
        # Numba takes the parameters from here, the first one being its own.
        operation.__signature__ = inspect.signature(emit)  # type: ignore[attr-defined]
        return intrinsic(operation)

    return decorate


def _pointer(builder: Any, address: Any, index: Any, kind: Any, size: int = 4) -> Any:
    offset = builder.mul(index, ir.Constant(_I64, size))
    return builder.inttoptr(builder.add(address, offset), kind.as_pointer())


def _constant(value: float, kind: Any = _FLOATS) -> Any:
    return ir.Constant(kind, [ir.Constant(kind.element, value)] * LANES)


def _spread(builder: Any, value: Any) -> Any:
    first = builder.insert_element(ir.Constant(_FLOATS, ir.Undefined), value, ir.Constant(_I32, 0))
    return builder.shuffle_vector(first, first, _constant(0, _INTS))


def _call(builder: Any, name: str, *args: Any) -> Any:
    kind = ir.FunctionType(_FLOATS, [_FLOATS] * len(args))
    function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.{name}.v{LANES}f32")
    return builder.call(function, args)


def _convert_half(builder: Any, bits: Any) -> Any:
    kind = ir.VectorType(_F16, LANES)
    return builder.fpext(builder.bitcast(bits, kind), _FLOATS)


def _convert_bfloat(builder: Any, bits: Any) -> Any:
    wide = builder.shl(builder.zext(bits, _INTS), _constant(16, _INTS))
    return builder.bitcast(wide, _FLOATS)


@_operation(vector(types.intp, types.intp))
def load(builder: Any, address: Any, index: Any) -> Any:
    """``LANES`` float32 values from element ``index`` on."""
    return builder.load(_pointer(builder, address, index, _FLOATS), align=4)


@_operation(vector(types.intp, types.intp))
def load_bfloat16(builder: Any, address: Any, index: Any) -> Any:
    """``LANES`` bfloat16 values as float32."""
    at = _pointer(builder, address, index, ir.VectorType(_I16, LANES), 2)
    return _convert_bfloat(builder, builder.load(at, align=2))


@_operation(vector(types.intp, types.intp))
def load_float16(builder: Any, address: Any, index: Any) -> Any:
    """``LANES`` float16 values as float32."""
    at = _pointer(builder, address, index, ir.VectorType(_I16, LANES), 2)
    return _convert_half(builder, builder.load(at, align=2))


@_operation(types.void(types.intp, types.intp, vector))
def store(builder: Any, address: Any, index: Any, value: Any) -> None:
    """Write ``LANES`` float32 values from element ``index`` on."""
    builder.store(value, _pointer(builder, address, index, _FLOATS), align=4)


@_operation(types.float32(types.intp, types.intp))
def get(builder: Any, address: Any, index: Any) -> Any:
    """One float32."""
    return builder.load(_pointer(builder, address, index, _F32), align=4)


@_operation(types.void(types.intp, types.intp, types.float32))
def put(builder: Any, address: Any, index: Any, value: Any) -> None:
    """Write one float32."""
    builder.store(value, _pointer(builder, address, index, _F32), align=4)


@_operation(types.int64(types.intp, types.intp))
def get_int32(builder: Any, address: Any, index: Any) -> Any:
    """One int32."""
    return builder.sext(builder.load(_pointer(builder, address, index, _I32), align=4), _I64)


@_operation(types.void(types.intp, types.intp, types.int64))
def put_int32(builder: Any, address: Any, index: Any, value: Any) -> None:
    """Write one int32."""
    builder.store(builder.trunc(value, _I32), _pointer(builder, address, index, _I32), align=4)


def records(dtype: np.dtype) -> Any:
    """A function from an address to a pointer to records of a NumPy dtype, for ``carray``."""
    kind = types.CPointer(from_dtype(dtype))

    @_operation(kind(types.intp))
    def pointer(builder: Any, address: Any) -> Any:
        record = ir.ArrayType(ir.IntType(8), dtype.itemsize)
        return builder.inttoptr(address, record.as_pointer())

    return pointer


@_operation(types.int64(types.intp, types.int64))
def fetch_add(builder: Any, address: Any, value: Any) -> Any:
    """Add to the int64 at ``address`` and return what it was; safe among threads."""
    at = builder.inttoptr(address, _I64.as_pointer())
    return builder.atomic_rmw("add", at, value, "monotonic")


@_operation(types.void(types.intp, types.intp))
def prefetch(builder: Any, address: Any, offset: Any) -> None:
    """Ask for the cache line ``offset`` bytes behind ``address``."""
    kind = ir.FunctionType(ir.VoidType(), [ir.IntType(8).as_pointer(), _I32, _I32, _I32])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    at = _pointer(builder, address, offset, ir.IntType(8), 1)
    read, keep, data = (ir.Constant(_I32, n) for n in (0, 3, 1))
    builder.call(function, [at, read, keep, data])


@_operation(vector(types.float32))
def splat(builder: Any, value: Any) -> Any:
    """The same value in every lane."""
    return _spread(builder, value)


@_operation(vector(vector, vector))
def add(builder: Any, a: Any, b: Any) -> Any:
    """``a + b``."""
    return builder.fadd(a, b)


@_operation(vector(vector, vector))
def sub(builder: Any, a: Any, b: Any) -> Any:
    """``a - b``."""
    return builder.fsub(a, b)


@_operation(vector(vector, vector))
def mul(builder: Any, a: Any, b: Any) -> Any:
    """``a * b``."""
    return builder.fmul(a, b)


@_operation(vector(vector, vector))
def div(builder: Any, a: Any, b: Any) -> Any:
    """``a / b``."""
    return builder.fdiv(a, b)


@_operation(vector(vector, vector))
def maximum(builder: Any, a: Any, b: Any) -> Any:
    """The larger of each pair."""
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


@_operation(vector(vector, vector))
def minimum(builder: Any, a: Any, b: Any) -> Any:
    """The smaller of each pair."""
    return builder.select(builder.fcmp_ordered("<", a, b), a, b)


@_operation(vector(vector))
def exp2(builder: Any, x: Any) -> Any:
    """``2^x``, relative error about 1e-7; below 2^-126 it stays 2^-126, above 2^127 it is wrong."""
    low = _constant(-126.0)
    x = builder.select(builder.fcmp_ordered(">", x, low), x, low)
    whole = _call(builder, "nearbyint", x)
    rest = builder.fsub(x, whole)
    power = _constant(float(_EXP2[-1]))
    for coefficient in _EXP2[-2::-1]:
        power = _call(builder, "fma", power, rest, _constant(float(coefficient)))
    biased = builder.add(builder.fptosi(whole, _INTS), _constant(127, _INTS))
    scale = builder.bitcast(builder.shl(biased, _constant(23, _INTS)), _FLOATS)
    return builder.fmul(power, scale)


@_operation(vector(vector, vector, types.float32))
def hide_behind(builder: Any, score: Any, last: Any, position: Any) -> Any:
    """``score`` where ``position <= last``, ``HIDDEN`` elsewhere."""
    seen = builder.fcmp_ordered("<=", _spread(builder, position), last)
    return builder.select(seen, score, _constant(HIDDEN))


def product_tile(rows: int, vectors: int, stride: int, *, accumulate: bool) -> Any:
    """A product of ``rows`` by ``vectors * LANES`` values, held in registers while it is summed.

    The function made is ``tile(c, a, a_row, a_step, b, count, factor)`` with
    ``c[i, :] = sum_n a[i, n] * b[n, :]`` for ``n < count``, where ``a[i, n]`` lies at element
    ``a_row * i + a_step * n`` and the rows of ``b`` and ``c`` are ``stride`` elements apart. With
    ``accumulate`` it is ``c[i, :] = c[i, :] * factor[:] + ...``; otherwise ``factor`` is not read.

    ``rows * vectors`` accumulators, ``vectors`` values of ``b`` and one of ``a`` must fit in the
    registers.
    """

    def number(value: int) -> Any:
        return ir.Constant(_I64, value)

    @_operation(types.void(*[types.intp] * 7))
    def tile(
        builder: Any,
        c: Any,
        a: Any,
        a_row: Any,
        a_step: Any,
        b: Any,
        count: Any,
        factor: Any,
    ) -> None:
        sums = [cgutils.alloca_once_value(builder, _constant(0.0)) for _ in range(rows * vectors)]
        with cgutils.for_range(builder, count) as loop:
            row_of_b = builder.mul(loop.index, number(stride))
            at_a = builder.mul(loop.index, a_step)
            columns = []
            for v in range(vectors):
                at = _pointer(builder, b, builder.add(row_of_b, number(v * LANES)), _FLOATS)
                columns.append(builder.load(at, align=4))
            for i in range(rows):
                place = builder.add(at_a, builder.mul(a_row, number(i)))
                value = _spread(builder, builder.load(_pointer(builder, a, place, _F32), align=4))
                for v, column in enumerate(columns):
                    total = sums[i * vectors + v]
                    more = _call(builder, "fma", value, column, builder.load(total))
                    builder.store(more, total)
        for i in range(rows):
            for v in range(vectors):
                at = _pointer(builder, c, number(i * stride + v * LANES), _FLOATS)
                value = builder.load(sums[i * vectors + v])
                if accumulate:
                    scale = _pointer(builder, factor, number(v * LANES), _FLOATS)
                    old = builder.load(at, align=4)
                    value = _call(builder, "fma", old, builder.load(scale, align=4), value)
                builder.store(value, at, align=4)

    return tile
