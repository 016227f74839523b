"""Vectors of float32 as a Numba type, so that kernels of the CPU path are written in Python.

Numba has no vector registers in its language and its loop vectorizer does not block products over
registers, which is most of the speed of an attention kernel. So a vector is a type of its own
here, with the few operations that the kernels need, each translated to one LLVM instruction or
intrinsic. The register-blocked products that kernels are built around are in
:mod:`aspire_sglang.attention.tiles`.

Memory is addressed by plain integers and an index in elements: nothing is checked, and callers
hand over only addresses of live tensors.
"""

from __future__ import annotations

import functools
import inspect
import math
import platform
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
#: Exponentials are powers of two here.
LOG2E = math.log2(math.e)
#: Score of a key that a query may not see; finite, so that no difference of scores is NaN.
HIDDEN = -1e30

_IS_X86 = platform.machine().lower() in ("x86_64", "amd64")
_I16, _I32, I64 = ir.IntType(16), ir.IntType(32), ir.IntType(64)
_F16, F32 = ir.HalfType(), ir.FloatType()
FLOATS, _INTS = ir.VectorType(F32, LANES), ir.VectorType(_I32, LANES)
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
        super().__init__(manager, kind, FLOATS)


def operation(signature: Any) -> Callable[[Callable[..., Any]], Any]:
    """Make ``emit(builder, *values)`` a function that Numba code can call."""

    def decorate(emit: Callable[..., Any]) -> Any:
        def codegen(context: Any, builder: Any, _: Any, args: Any) -> Any:
            value = emit(builder, *args)
            return context.get_dummy_value() if signature.return_type == types.void else value

        def typed(typing: Any, *_: Any) -> Any:
            return signature, codegen

        functools.update_wrapper(typed, emit)
        # Numba takes the parameters from here, the first one being its own.
        typed.__signature__ = inspect.signature(emit)  # type: ignore[attr-defined]
        return intrinsic(typed)

    return decorate


def pointer(builder: Any, address: Any, index: Any, kind: Any, size: int = 4) -> Any:
    offset = builder.mul(index, ir.Constant(I64, size))
    return builder.inttoptr(builder.add(address, offset), kind.as_pointer())


def constant(value: float, kind: Any = FLOATS) -> Any:
    return ir.Constant(kind, [ir.Constant(kind.element, value)] * LANES)


def spread(builder: Any, value: Any) -> Any:
    first = builder.insert_element(ir.Constant(FLOATS, ir.Undefined), value, ir.Constant(_I32, 0))
    return builder.shuffle_vector(first, first, constant(0, _INTS))


def call(builder: Any, name: str, *args: Any) -> Any:
    kind = ir.FunctionType(FLOATS, [FLOATS] * len(args))
    function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.{name}.v{LANES}f32")
    return builder.call(function, args)


def load_as_float(builder: Any, address: Any, index: Any, kind: str) -> Any:
    """``LANES`` values of NumPy's or PyTorch's type ``kind`` from element ``index`` on."""
    if kind == "float32":
        return builder.load(pointer(builder, address, index, FLOATS), align=4)
    bits = ir.VectorType(_I16, LANES)
    half = builder.load(pointer(builder, address, index, bits, 2), align=2)
    convert = _convert_bfloat if kind == "bfloat16" else _convert_half
    return convert(builder, half)


def slot_of(builder: Any, slots: Any, index: Any) -> Any:
    """Element ``index`` of int32 slots, as int64."""
    return builder.sext(builder.load(pointer(builder, slots, index, _I32), align=4), I64)


def prefetch_line(builder: Any, address: Any) -> None:
    """Ask for the cache line at ``address``."""
    kind = ir.FunctionType(ir.VoidType(), [ir.IntType(8).as_pointer(), _I32, _I32, _I32])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    read, keep, data = (ir.Constant(_I32, n) for n in (0, 3, 1))
    at = builder.inttoptr(address, ir.IntType(8).as_pointer())
    builder.call(function, [at, read, keep, data])


def _convert_half(builder: Any, bits: Any) -> Any:
    kind = ir.VectorType(_F16, LANES)
    return builder.fpext(builder.bitcast(bits, kind), FLOATS)


def _convert_bfloat(builder: Any, bits: Any) -> Any:
    wide = builder.shl(builder.zext(bits, _INTS), constant(16, _INTS))
    return builder.bitcast(wide, FLOATS)


@operation(vector(types.intp, types.intp))
def load(builder: Any, address: Any, index: Any) -> Any:
    """``LANES`` float32 values from element ``index`` on."""
    return builder.load(pointer(builder, address, index, FLOATS), align=4)


@operation(vector(types.intp, types.intp))
def load_bfloat16(builder: Any, address: Any, index: Any) -> Any:
    """``LANES`` bfloat16 values as float32."""
    at = pointer(builder, address, index, ir.VectorType(_I16, LANES), 2)
    return _convert_bfloat(builder, builder.load(at, align=2))


@operation(vector(types.intp, types.intp))
def load_float16(builder: Any, address: Any, index: Any) -> Any:
    """``LANES`` float16 values as float32."""
    at = pointer(builder, address, index, ir.VectorType(_I16, LANES), 2)
    return _convert_half(builder, builder.load(at, align=2))


@operation(vector(types.intp, types.intp))
def load_uint8(builder: Any, address: Any, index: Any) -> Any:
    """``LANES`` bytes as float32."""
    at = pointer(builder, address, index, ir.VectorType(ir.IntType(8), LANES), 1)
    return builder.sitofp(builder.zext(builder.load(at, align=1), _INTS), FLOATS)


@operation(types.void(types.intp, types.intp, vector))
def store(builder: Any, address: Any, index: Any, value: Any) -> None:
    """Write ``LANES`` float32 values from element ``index`` on."""
    builder.store(value, pointer(builder, address, index, FLOATS), align=4)


@operation(types.float32(types.intp, types.intp))
def get(builder: Any, address: Any, index: Any) -> Any:
    """One float32."""
    return builder.load(pointer(builder, address, index, F32), align=4)


@operation(types.void(types.intp, types.intp, types.float32))
def put(builder: Any, address: Any, index: Any, value: Any) -> None:
    """Write one float32."""
    builder.store(value, pointer(builder, address, index, F32), align=4)


@operation(types.int64(types.intp, types.intp))
def get_int32(builder: Any, address: Any, index: Any) -> Any:
    """One int32."""
    return builder.sext(builder.load(pointer(builder, address, index, _I32), align=4), I64)


@operation(types.int64(types.intp, types.intp))
def get_int64(builder: Any, address: Any, index: Any) -> Any:
    """One int64."""
    return builder.load(pointer(builder, address, index, I64, 8), align=8)


@operation(types.void(types.intp, types.intp, types.int64))
def put_int64(builder: Any, address: Any, index: Any, value: Any) -> None:
    """Write one int64."""
    builder.store(value, pointer(builder, address, index, I64, 8), align=8)


@operation(types.void(types.intp, types.intp, types.int64))
def put_int32(builder: Any, address: Any, index: Any, value: Any) -> None:
    """Write one int32."""
    builder.store(builder.trunc(value, _I32), pointer(builder, address, index, _I32), align=4)


def records(dtype: np.dtype) -> Any:
    """A function from an address to a pointer to records of a NumPy dtype, for ``carray``."""
    kind = types.CPointer(from_dtype(dtype))

    @operation(kind(types.intp))
    def to_records(builder: Any, address: Any) -> Any:
        record = ir.ArrayType(ir.IntType(8), dtype.itemsize)
        return builder.inttoptr(address, record.as_pointer())

    return to_records


@operation(types.int64(types.intp, types.int64))
def fetch_add(builder: Any, address: Any, value: Any) -> Any:
    """Add to the int64 at ``address`` and return what it was; safe among threads."""
    at = builder.inttoptr(address, I64.as_pointer())
    return builder.atomic_rmw("add", at, value, "monotonic")


@operation(types.void(types.intp, types.int64, types.int64, types.int64))
def call_work(builder: Any, function: Any, argument: Any, item: Any, thread: Any) -> None:
    """Call the C function ``void function(int64, int64, int64)`` at an address."""
    kind = ir.FunctionType(ir.VoidType(), [I64, I64, I64])
    builder.call(builder.inttoptr(function, kind.as_pointer()), [argument, item, thread])


@operation(types.int64(types.intp))
def read_counter(builder: Any, address: Any) -> Any:
    """The int64 at ``address`` as other threads left it, with all they wrote before."""
    at = builder.inttoptr(address, I64.as_pointer())
    return builder.load_atomic(at, "acquire", 8)


@operation(types.void(types.intp, types.int64))
def count_done(builder: Any, address: Any, value: Any) -> None:
    """Add to the int64 at ``address``, for :func:`read_counter` of other threads."""
    at = builder.inttoptr(address, I64.as_pointer())
    builder.atomic_rmw("add", at, value, "seq_cst")


@operation(types.void())
def pause(builder: Any) -> None:
    """Tell the core that this thread waits for another."""
    if _IS_X86:
        kind = ir.FunctionType(ir.VoidType(), [])
        name = "llvm.x86.sse2.pause"
        builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [])


@operation(types.void(types.intp, types.intp))
def prefetch(builder: Any, address: Any, offset: Any) -> None:
    """Ask for the cache line ``offset`` bytes behind ``address``."""
    kind = ir.FunctionType(ir.VoidType(), [ir.IntType(8).as_pointer(), _I32, _I32, _I32])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    at = pointer(builder, address, offset, ir.IntType(8), 1)
    read, keep, data = (ir.Constant(_I32, n) for n in (0, 3, 1))
    builder.call(function, [at, read, keep, data])


@operation(vector(types.float32))
def splat(builder: Any, value: Any) -> Any:
    """The same value in every lane."""
    return spread(builder, value)


@operation(vector(vector, vector))
def add(builder: Any, a: Any, b: Any) -> Any:
    """``a + b``."""
    return builder.fadd(a, b)


@operation(vector(vector, vector))
def sub(builder: Any, a: Any, b: Any) -> Any:
    """``a - b``."""
    return builder.fsub(a, b)


@operation(vector(vector, vector))
def mul(builder: Any, a: Any, b: Any) -> Any:
    """``a * b``."""
    return builder.fmul(a, b)


@operation(vector(vector, vector, vector))
def fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """``a * b + c``, rounded once."""
    return call(builder, "fma", a, b, c)


@operation(vector(vector, vector))
def div(builder: Any, a: Any, b: Any) -> Any:
    """``a / b``."""
    return builder.fdiv(a, b)


@operation(vector(vector, vector))
def maximum(builder: Any, a: Any, b: Any) -> Any:
    """The larger of each pair."""
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


@operation(vector(vector, vector))
def minimum(builder: Any, a: Any, b: Any) -> Any:
    """The smaller of each pair."""
    return builder.select(builder.fcmp_ordered("<", a, b), a, b)


@operation(vector(vector))
def exp2(builder: Any, x: Any) -> Any:
    """``2^x``, relative error about 1e-7; below 2^-126 it stays 2^-126, above 2^127 it is wrong."""
    low = constant(-126.0)
    x = builder.select(builder.fcmp_ordered(">", x, low), x, low)
    whole = call(builder, "nearbyint", x)
    rest = builder.fsub(x, whole)
    power = constant(float(_EXP2[-1]))
    for coefficient in _EXP2[-2::-1]:
        power = call(builder, "fma", power, rest, constant(float(coefficient)))
    biased = builder.add(builder.fptosi(whole, _INTS), constant(127, _INTS))
    scale = builder.bitcast(builder.shl(biased, constant(23, _INTS)), FLOATS)
    return builder.fmul(power, scale)


@operation(vector(vector, vector, types.float32))
def hide_behind(builder: Any, score: Any, last: Any, position: Any) -> Any:
    """``score`` where ``position <= last``, ``HIDDEN`` elsewhere."""
    seen = builder.fcmp_ordered("<=", spread(builder, position), last)
    return builder.select(seen, score, constant(HIDDEN))


@operation(vector(vector))
def largest(builder: Any, x: Any) -> Any:
    """The largest lane, in every lane."""
    return _across(builder, x, lambda a, b: builder.select(builder.fcmp_ordered(">", a, b), a, b))


@operation(types.float32(vector))
def first_lane(builder: Any, x: Any) -> Any:
    """The value of the first lane."""
    return builder.extract_element(x, ir.Constant(_I32, 0))


@operation(types.float32(vector))
def lane_sum(builder: Any, x: Any) -> Any:
    """The sum of the lanes, halves first."""
    total = _across(builder, x, builder.fadd)
    return builder.extract_element(total, ir.Constant(_I32, 0))


def _across(builder: Any, x: Any, combine: Callable[..., Any]) -> Any:
    """Combine the lanes by halves; every lane holds the result."""
    distance = LANES // 2
    while distance:
        order = [lane ^ distance for lane in range(LANES)]
        other = builder.shuffle_vector(x, x, ir.Constant(_INTS, order))
        x = combine(x, other)
        distance //= 2
    return x
