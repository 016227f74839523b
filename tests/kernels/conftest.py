"""Run the kernels in Triton's interpreter, on the CPU.

Triton decides at import, its own and that of each kernel, whether functions are compiled or
interpreted, so a process does one or the other. The variable is set while tests are collected and
during each test of this folder only: servers that other tests start must not inherit it.
"""

import dataclasses
import os
import sys
from collections.abc import Iterator
from types import FunctionType

import pytest

VARIABLE = "TRITON_INTERPRET"

if "triton" in sys.modules and not os.environ.get(VARIABLE):
    raise pytest.UsageError(
        "tests/kernels needs Triton's interpreter, but triton was imported before: run "
        "'pytest tests/kernels' in a process of its own"
    )

_before = os.environ.get(VARIABLE)
os.environ[VARIABLE] = "1"

from triton.runtime import interpreter  # noqa: E402


def pytest_collection_finish():
    if _before is None:
        os.environ.pop(VARIABLE, None)


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    monkeypatch.setenv(VARIABLE, "1")


@pytest.fixture(scope="package", autouse=True)
def language() -> Iterator[None]:
    """Spare the interpreter work without a result, half of the time of these tests.

    It replaces Triton's language by its own at every launch, and again at every call of a function
    inside of a kernel; what it puts there is always the same, so here it does so once. It looks
    for overflows of every sum and product, and drops what it finds where it is not debugging.
    """
    replace = interpreter._patch_lang
    replaced: dict[str, interpreter._LangPatchScope] = {}

    def replace_once(function: FunctionType) -> interpreter._LangPatchScope:
        # It depends on what the function's module imports.
        if function.__module__ not in replaced:
            replaced[function.__module__] = replace(function)
        return interpreter._LangPatchScope()

    options = interpreter.interpreter_builder.options
    assert not options.debug
    unchecked = dataclasses.replace(options, sanitize_overflow=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", replace_once)
        patch.setattr(interpreter.interpreter_builder, "options", unchecked)
        yield
    for scope in reversed(replaced.values()):
        scope.restore()
