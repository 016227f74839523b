"""Products blocked over registers: the inner loops of the CPU kernels.

A tile of sums stays in registers while rows are read, see Van Zee and van de Geijn (2015). In
:func:`product_tile` the lanes of vectors are queries, or output columns; in :func:`dot_tile` and
:func:`weigh_tile` they are columns of a head, for a few queries that read rows of a pool from where
they lie.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types

from aspire_sglang.attention.simd import (
    F32,
    FLOATS,
    I64,
    LANES,
    call,
    constant,
    load_as_float,
    operation,
    pointer,
    prefetch_line,
    slot_of,
    spread,
)

#: Bytes of a cache line.
LINE = 64
#: Rows between the one read and the one asked for.
AHEAD = 32


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
        return ir.Constant(I64, value)

    @operation(types.void(*[types.intp] * 7))
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
        sums = [cgutils.alloca_once_value(builder, constant(0.0)) for _ in range(rows * vectors)]
        with cgutils.for_range(builder, count) as loop:
            row_of_b = builder.mul(loop.index, number(stride))
            at_a = builder.mul(loop.index, a_step)
            columns = []
            for v in range(vectors):
                at = pointer(builder, b, builder.add(row_of_b, number(v * LANES)), FLOATS)
                columns.append(builder.load(at, align=4))
            for i in range(rows):
                place = builder.add(at_a, builder.mul(a_row, number(i)))
                value = spread(builder, builder.load(pointer(builder, a, place, F32), align=4))
                for v, column in enumerate(columns):
                    total = sums[i * vectors + v]
                    more = call(builder, "fma", value, column, builder.load(total))
                    builder.store(more, total)
        for i in range(rows):
            for v in range(vectors):
                at = pointer(builder, c, number(i * stride + v * LANES), FLOATS)
                value = builder.load(sums[i * vectors + v])
                if accumulate:
                    scale = pointer(builder, factor, number(v * LANES), FLOATS)
                    old = builder.load(at, align=4)
                    value = call(builder, "fma", old, builder.load(scale, align=4), value)
                builder.store(value, at, align=4)

    return tile


def _number(value: int) -> Any:
    return ir.Constant(I64, value)


class _Rows:
    """Rows of a pool, by the slots of keys ``first .. stop``; keys behind the last are the last."""

    def __init__(self, builder: Any, base: Any, slots: Any, stop: Any, size: int) -> None:
        self._builder, self._base, self._slots, self._size = builder, base, slots, size
        self._stop, self._last = stop, builder.sub(stop, _number(1))

    def address(self, key: Any) -> Any:
        builder = self._builder
        inside = builder.icmp_signed("<", key, self._stop)
        slot = slot_of(builder, self._slots, builder.select(inside, key, self._last))
        return builder.add(self._base, builder.mul(slot, _number(self._size)))

    def ask_for(self, key: Any, count: int) -> None:
        """Ask for ``count`` bytes of the row ``AHEAD`` of a key."""
        builder = self._builder
        row = self.address(builder.add(key, _number(AHEAD)))
        for offset in range(0, count, LINE):
            prefetch_line(builder, builder.add(row, _number(offset)))


def dot_tile(queries: int, keys: int, dim: int, kv_bits: str, stride: int) -> Any:
    """Scores of ``queries`` by ``keys`` rows of a pool.

    The function made is ``tile(scores, q, base, slots, key, stop)`` with
    ``scores[g, k] = q[g, :] . row(slots[key + k])``, rows of ``scores`` being ``stride`` elements
    apart and those of ``q`` ``dim``. Behind ``stop`` the last row is read again.

    Args:
        queries, keys: ``keys`` is a power of two, at most ``LANES``.
        dim: columns, a multiple of ``LANES``.
        kv_bits: ``"float32"``, ``"bfloat16"`` or ``"float16"``.
    """
    size = 4 if kv_bits == "float32" else 2

    @operation(types.void(*[types.intp] * 6))
    def tile(builder: Any, scores: Any, q: Any, base: Any, slots: Any, key: Any, stop: Any) -> None:
        rows = _Rows(builder, base, slots, stop, dim * size)
        addresses = []
        for k in range(keys):
            at = builder.add(key, _number(k))
            addresses.append(rows.address(at))
            rows.ask_for(at, dim * size)
        sums = [cgutils.alloca_once_value(builder, constant(0.0)) for _ in range(queries * keys)]
        with cgutils.for_range(builder, _number(dim // LANES)) as loop:
            at = builder.mul(loop.index, _number(LANES))
            columns = [
                builder.load(
                    pointer(builder, q, builder.add(at, _number(g * dim)), FLOATS), align=4
                )
                for g in range(queries)
            ]
            for k in range(keys):
                row = load_as_float(builder, addresses[k], at, kv_bits)
                for g, column in enumerate(columns):
                    place = sums[g * keys + k]
                    builder.store(call(builder, "fma", row, column, builder.load(place)), place)
        for g in range(queries):
            parts = [builder.load(place) for place in sums[g * keys : (g + 1) * keys]]
            result = _pairwise(builder, parts)
            for k in range(keys):
                lane = builder.extract_element(result, ir.Constant(ir.IntType(32), k))
                builder.store(lane, pointer(builder, scores, _number(g * stride + k), F32), align=4)

    return tile


def _pairwise(builder: Any, parts: list[Any]) -> Any:
    """A vector whose first lanes are the sums of all lanes of each part."""
    levels = LANES.bit_length() - 1
    for _ in range(levels):
        second = parts[1::2] or parts
        parts = [_adjacent_sums(builder, *pair) for pair in zip(parts[::2], second, strict=True)]
    return parts[0]


def _adjacent_sums(builder: Any, a: Any, b: Any) -> Any:
    kind = ir.VectorType(ir.IntType(32), LANES)
    even = ir.Constant(kind, list(range(0, 2 * LANES, 2)))
    odd = ir.Constant(kind, list(range(1, 2 * LANES, 2)))
    return builder.fadd(builder.shuffle_vector(a, b, even), builder.shuffle_vector(a, b, odd))


def weigh_tile(queries: int, columns: int, dim: int, kv_bits: str, stride: int) -> Any:
    """Weighted sums of rows of a pool, ``columns`` vectors of their columns.

    The function made is ``tile(out, weights, base, slots, first, stop, factors)`` with
    ``out[g, :] = out[g, :] * factors[g] + sum_k weights[g, k - first] * row(slots[k])`` for
    ``first <= k < stop``; rows of ``weights`` are ``stride`` elements apart and those of ``out``
    ``dim``. ``out`` and ``base`` are addresses of the first of the columns.
    """
    size = 4 if kv_bits == "float32" else 2

    @operation(types.void(*[types.intp] * 8))
    def tile(
        builder: Any,
        out: Any,
        weights: Any,
        base: Any,
        slots: Any,
        first: Any,
        count: Any,
        stop: Any,
        factors: Any,
    ) -> None:
        rows = _Rows(builder, base, slots, stop, dim * size)
        sums = [cgutils.alloca_once_value(builder, constant(0.0)) for _ in range(queries * columns)]
        with cgutils.for_range(builder, count) as loop:
            key = builder.add(first, loop.index)
            row = rows.address(key)
            rows.ask_for(key, columns * LANES * size)
            values = [
                load_as_float(builder, row, _number(c * LANES), kv_bits) for c in range(columns)
            ]
            for g in range(queries):
                at = builder.add(loop.index, _number(g * stride))
                weight = spread(builder, builder.load(pointer(builder, weights, at, F32), align=4))
                for c, value in enumerate(values):
                    place = sums[g * columns + c]
                    builder.store(call(builder, "fma", weight, value, builder.load(place)), place)
        for g in range(queries):
            factor = builder.load(pointer(builder, factors, _number(g), F32), align=4)
            factor = spread(builder, factor)
            for c in range(columns):
                at = pointer(builder, out, _number(g * dim + c * LANES), FLOATS)
                total = builder.load(sums[g * columns + c])
                old = builder.load(at, align=4)
                builder.store(call(builder, "fma", old, factor, total), at, align=4)

    return tile
