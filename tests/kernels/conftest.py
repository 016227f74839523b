"""Run the kernels in Triton's interpreter, on the CPU.

Triton decides at import, its own and that of each kernel, whether functions are compiled or
interpreted, so a process does one or the other. The variable is set while tests are collected and
during each test of this folder only: servers that other tests start must not inherit it.
"""

import os
import sys

import pytest

VARIABLE = "TRITON_INTERPRET"

if "triton" in sys.modules and not os.environ.get(VARIABLE):
    raise pytest.UsageError(
        "tests/kernels needs Triton's interpreter, but triton was imported before: run "
        "'pytest tests/kernels' in a process of its own"
    )

_before = os.environ.get(VARIABLE)
os.environ[VARIABLE] = "1"

import triton  # noqa: E402, F401


def pytest_collection_finish():
    if _before is None:
        os.environ.pop(VARIABLE, None)


@pytest.fixture(autouse=True)
def interpreter(monkeypatch):
    monkeypatch.setenv(VARIABLE, "1")
