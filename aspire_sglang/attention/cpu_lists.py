"""Page lists per layer as KV slots: the CPU path's kernel for draft rows.

Computes what :meth:`aspire_sglang.context.layer_lists.LayerLists.draft_pages` defines and looks the
pages' slots up in the request table. Layers that share their own pages have one list.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import carray, njit
from torch import Tensor

from aspire_sglang.attention.program import Program, work
from aspire_sglang.attention.simd import get_int32, put_int32, records
from aspire_sglang.context.layer_lists import LayerLists

#: A draft row.
READER = np.dtype(
    [
        ("own", np.int64),  # address of int32 [lists, own_width]
        ("own_count", np.int64),
        ("ranked", np.int64),  # address of int32 [ranked_count]
        ("ranked_count", np.int64),
        ("tail", np.int64),  # first page of the tail
        ("head", np.int64),  # pages to read before it
        ("position", np.int64),  # of the query
        ("table", np.int64),  # address of int32 slots by position
        ("slots", np.int64),  # address of the result, int32 [lists, length]
        ("length", np.int64),
    ]
)
CALL = np.dtype(
    [
        ("readers", np.int64),  # address of READER records
        ("num_lists", np.int64),
        ("own_width", np.int64),
        ("page_size", np.int64),
        ("sink_pages", np.int64),
        ("most_pages", np.int64),  # of any tail's beginning
    ]
)
_readers, _calls = records(READER), records(CALL)
_compiled = njit(error_model="numpy", nogil=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)


@_compiled
def _list_head(call, reader, number, listed):
    """Mark the pages to read before the tail."""
    for page in range(reader.tail):
        listed[page] = 0
    room = reader.head
    for page in range(min(call.sink_pages, reader.tail)):
        listed[page] = 1
        room -= 1
    for i in range(reader.own_count):
        page = get_int32(reader.own, number * call.own_width + i)
        if room > 0 and page < reader.tail and listed[page] == 0:
            listed[page] = 1
            room -= 1
    for i in range(reader.ranked_count):
        if room <= 0:
            break
        page = get_int32(reader.ranked, i)
        if page < reader.tail and listed[page] == 0:
            listed[page] = 1
            room -= 1
    page = reader.tail - 1
    while room > 0 and page >= 0:
        if listed[page] == 0:
            listed[page] = 1
            room -= 1
        page -= 1


@_compiled
def _write_slots(call, reader, number, listed):
    at = number * reader.length
    size = call.page_size
    for page in range(reader.tail):
        if listed[page]:
            for position in range(page * size, (page + 1) * size):
                put_int32(reader.slots, at, get_int32(reader.table, position))
                at += 1
    for position in range(reader.tail * size, reader.position + 1):
        put_int32(reader.slots, at, get_int32(reader.table, position))
        at += 1


@work
def list_slots(argument, item, thread):
    """The work of a phase: one list of a row; its argument is the address of a ``CALL``.

    Items are rows by lists.
    """
    call = carray(_calls(argument), 1)[0]
    reader = carray(_readers(call.readers), item + 1)[item // call.num_lists]
    number = item % call.num_lists
    listed = np.empty(call.most_pages, dtype=np.uint8)
    _list_head(call, reader, number, listed)
    _write_slots(call, reader, number, listed)


def draft_slots(
    lists: LayerLists, slots: list[int], positions: list[int], table: Tensor
) -> list[Tensor]:
    """KV slots that draft rows read, by every list.

    Args:
        lists: the page lists.
        slots: row of the request table per draft row.
        positions: of the rows' queries.
        table: int32 ``[num_slots, width]``, contiguous: KV slot of each position.

    Returns:
        Per row int32 ``[num_lists, L]``: in order of position, the query's own last.

    Raises:
        ValueError: if a position lies behind the table.
    """
    size = lists.config.page_size
    if not table.is_contiguous() or table.dtype != torch.int32:
        raise ValueError("the request table must be contiguous int32")
    if max(positions, default=0) >= table.shape[1]:
        raise ValueError(f"position {max(positions)} in a table of {table.shape[1]} positions")
    where = torch.tensor(slots)
    tails, heads = (t.tolist() for t in lists.spans(where, torch.tensor(positions)))
    counts = zip(lists.own_counts[where].tolist(), lists.ranked_counts[where].tolist(), strict=True)
    readers = np.zeros(len(slots), READER)
    result = []
    for n, (own, ranked) in enumerate(counts):
        slot, position, tail, head = slots[n], positions[n], tails[n], heads[n]
        length = head * size + position + 1 - tail * size
        result.append(torch.empty(lists.num_lists, length, dtype=torch.int32))
        readers[n] = (
            lists.own[slot].data_ptr(),
            own,
            lists.ranked[slot].data_ptr(),
            ranked,
            tail,
            head,
            position,
            table[slot].data_ptr(),
            result[-1].data_ptr(),
            length,
        )
    call = np.zeros(1, CALL)
    call["readers"] = readers.ctypes.data
    call["num_lists"], call["own_width"] = lists.num_lists, lists.own.shape[-1]
    call["page_size"], call["sink_pages"] = size, lists.config.sink_pages
    call["most_pages"] = max(tails, default=0)
    program = Program(list_slots)
    program.argument[0], program.items[0] = call.ctypes.data, len(readers) * lists.num_lists
    program.run()
    return result
