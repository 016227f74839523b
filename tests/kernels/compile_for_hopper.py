"""Compile every Triton kernel for a Hopper GPU, on a machine that needs none.

Triton's interpreter, in which the kernels are tested on a CPU, takes programs that its compiler
refuses. Run as a program, not inside the tests: a process interprets or compiles. The tests' own
cases call the kernels; a launch compiles instead of running, so what a case then finds is ignored.
Prints one line per compiled variant, and exits with status 1 if one does not compile.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from triton.runtime.jit import JITFunction

from aspire_sglang.context.sparse import RefreshConfig
from tests.kernels import cases, layer_cases
from tests.kernels.step_model import SELECTION, Model

HOPPER = GPUTarget("cuda", 90, 32)
TYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.bool: "i1",
}

compiled: dict[str, bool] = {}
"""Variant: whether it compiled."""


def compile_launch(self: JITFunction, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
    """Takes the place of ``JITFunction.run``."""
    names = [parameter.name for parameter in self.params]
    options = {name: named.pop(name) for name in list(named) if name not in names}
    values = dict(zip(names, args, strict=False)) | named
    signature: dict[str, str] = {}
    constants: dict[tuple[int], Any] = {}
    for place, parameter in enumerate(self.params):
        value = values[parameter.name]
        kind = "constexpr" if parameter.is_constexpr else _kind(value)
        signature[parameter.name] = kind
        if kind == "constexpr":
            constants[(place,)] = value
    variant = f"{self.fn.__name__} {list(signature.values())} {constants} {options}"
    if variant in compiled:
        return
    try:
        compile(ASTSource(self, signature, constants), target=HOPPER, options=options)
    except Exception as fault:
        compiled[variant] = False
        print(f"failed: {variant}: {fault!r}"[:2000], flush=True)
    else:
        compiled[variant] = True
        print(f"compiled: {variant}"[:200], flush=True)


def _kind(value: Any) -> str:
    """Type of an argument as Triton specializes it."""
    if isinstance(value, torch.Tensor):
        return "*" + TYPES[value.dtype]
    if isinstance(value, float):
        return "fp32"
    return "constexpr" if value is None or value == 1 else "i32"


def launch(case: Callable[..., None], *args: Any) -> None:
    """Run a case up to what it finds."""
    with contextlib.suppress(AssertionError):
        case(*args)


def main() -> int:
    JITFunction.run = compile_launch  # type: ignore[method-assign]
    shapes = layer_cases.LAYER_SHAPES
    for name in ("short and long", "own pages only", "token pages", "page 64, KV page 16"):
        launch(layer_cases.check_selection, shapes[name], "random", "cpu")
        launch(layer_cases.check_tables, shapes[name], "cpu", 0, True)
    for shape in [*cases.LIST_SHAPES.values()][:3]:
        launch(cases.check_select_pages, shape, "random", "cpu")
        launch(cases.check_build_tables, shape, "cpu", 0, True)
        launch(cases.check_refresh_tables, shape, "cpu")
    for vote in [*cases.VOTE_SHAPES.values()][:3]:
        launch(cases.check_page_scores, vote, torch.bfloat16, "cpu", "max")
        launch(cases.check_page_lse, vote, torch.bfloat16, "cpu", True, True)
    launch(cases.check_accept_greedy, 3, 4, "cpu", 0)
    launch(cases.check_sample_tokens, 3, 1000, torch.bfloat16, "cpu", 0)
    # A whole mixed step: its layout, and attention by Triton.
    model = Model(1, RefreshConfig("hybrid", 1, True), selection=SELECTION, layers=2)
    launch(model.step, [1, 2], [230, 75], [0, 1], [False, True])
    return 0 if all(compiled.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
