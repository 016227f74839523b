"""Programs: phases of work on a team of threads."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numba import carray

from aspire_sglang.attention.program import Program, work
from aspire_sglang.attention.simd import fetch_add, records

_NUMBERS = records(np.dtype([("value", np.int64)]))


@work
def count_item(argument, item, thread):
    """Add 1 to number ``item``."""
    fetch_add(argument + 8 * item, 1)


@work
def sum_of_all(argument, item, thread):
    """Number ``item`` behind the first hundred: the sum of these, if all of them are there."""
    numbers = carray(_NUMBERS(argument), 1000)
    total = 0
    for n in range(100):
        total += numbers[n].value
    numbers[100 + item].value = total


@work
def note_thread(argument, item, thread):
    """Count the items of each thread."""
    for _ in range(20_000):
        fetch_add(argument + 8 * 900, 1)
    fetch_add(argument + 8 * thread, 1)


@pytest.fixture(params=[1, 2, 5])
def threads(request: pytest.FixtureRequest):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def test_a_phase_sees_all_of_the_one_before(threads: int) -> None:
    numbers = np.zeros(1000, np.int64)
    program = Program(count_item, sum_of_all, count_item, sum_of_all)
    program.argument[:] = numbers.ctypes.data
    program.items[:] = 100, 50, 100, 50
    for n in range(1, 201):
        program.run()
        assert (numbers[:100] == 2 * n).all()
        # The last phase has overwritten what the second one found.
        assert (numbers[100:150] == 200 * n).all()


def test_every_item_is_done_by_a_thread_of_the_team(threads: int) -> None:
    numbers = np.zeros(1000, np.int64)
    program = Program(note_thread)
    program.argument[:], program.items[:] = numbers.ctypes.data, 60
    program.run()
    assert numbers[:threads].sum() == 60
    assert not numbers[threads:900].any()
    if threads == 2:
        assert numbers[1], "the second thread never got an item"


def test_phases_without_items(threads: int) -> None:
    numbers = np.zeros(1000, np.int64)
    program = Program(count_item, count_item, sum_of_all)
    program.argument[:] = numbers.ctypes.data
    program.items[:] = 0, 7, 0
    program.run()
    assert numbers.tolist() == [1] * 7 + [0] * 993
