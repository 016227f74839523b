"""What a draft context costs a CPU step: attention, votes and lists of all layers, without a model.

    python bench/cpu_contexts.py --rows 8 --context 6000

Steps of SmolLM2's shape over random keys, contexts alternating inside one loop, so that a busy
machine is unfair to all alike. Layers share a few pools, together larger than any cache. The rest
of a step (linear layers, sampling, the scheduler) is the same for every context and not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

# See bench/cpu_kernels.py.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from aspire_sglang.attention.cpu_mixed import CpuMixedAttention
from aspire_sglang.attention.rows import ForwardRows
from aspire_sglang.context.selection import SelectionConfig
from aspire_sglang.context.sparse import RefreshConfig, SparseContext
from bench.provenance import provenance

HEADS, KV_HEADS, DIM, LAYERS, POOLS = 9, 3, 64, 30, 4
CONTEXTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "window": ("window", 16, {}),
    "refresh": ("refresh", 16, {}),
    "refresh, pages of 1": ("refresh", 1, {}),
    "last verify per layer": ("last_verify_per_layer", 16, {}),
    "hybrid, pages of 16": ("hybrid", 16, {}),
    "hybrid, a list for 3 layers": ("hybrid", 16, {"list_layers": 3}),
    "hybrid, a list for 5 layers": ("hybrid", 16, {"list_layers": 5}),
    "hybrid, pages of 8": ("hybrid", 8, {}),
    "hybrid, pages of 1": ("hybrid", 1, {}),
    "delta": ("delta", 16, {"group_layers": (7, 14, 21), "full_layers": 2}),
}
KINDS = ("draft", "one verifies", "all verify")


class Machine:
    """Attention of all layers of a step."""

    def __init__(self, rows: int, context: int, gamma: int, dtype: torch.dtype) -> None:
        self.rows, self.context, self.gamma = rows, context, gamma
        width = context + 2 * gamma + 2
        shape = (2, KV_HEADS, rows * width, DIM)
        self.pools = [torch.randn(shape).to(dtype).unbind(0) for _ in range(POOLS)]
        pool = SimpleNamespace(start_layer=0, head_major=lambda layer: self.pools[layer % POOLS])
        self.table = torch.arange(rows * width, dtype=torch.int32).view(rows, width)
        self.mixed = CpuMixedAttention(num_heads=HEADS, req_to_token=self.table, pool=pool)
        self.queries = torch.randn(rows * (gamma + 1), HEADS, DIM)

    def lists(self, source: str, page: int, tokens: int, options: dict[str, Any]) -> SparseContext:
        """Empty lists of one context."""
        return SparseContext(
            SelectionConfig(page, tokens // page, 0.0, max(16 // page, 1), 128 // page),
            RefreshConfig(source, LAYERS // 2 - 1, True, **options),  # type: ignore[arg-type]
            num_layers=LAYERS,
            num_slots=self.rows,
            context_len=self.table.shape[1],
        )

    def step(self, context: SparseContext, verifies: int, clock: Callable[[], float]) -> float:
        """Milliseconds of a step in which the first rows verify and the others draft."""
        self.mixed.context = context
        q_lens = [self.gamma + 1 if row < verifies else 1 for row in range(self.rows)]
        rows = ForwardRows(
            list(range(self.rows)),
            q_lens,
            [self.context + self.gamma + 1 if n > 1 else self.context + 1 for n in q_lens],
            [n == 1 for n in q_lens],
            decoding=True,
        )
        q = self.queries[: sum(q_lens)]
        out = torch.empty_like(q)
        start = clock()
        self.mixed.plan(rows)
        for layer in range(LAYERS):
            self.mixed.attend(
                SimpleNamespace(layer_id=layer, scaling=DIM**-0.5, logit_cap=0.0), q, out
            )
        return (clock() - start) * 1e3


def main(argv: Sequence[str] | None = None) -> int:
    """Time all contexts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--context", type=int, default=6000)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--gamma", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), default="float32")
    parser.add_argument("--contexts", nargs="+", choices=CONTEXTS, default=list(CONTEXTS))
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--cpu-time", action="store_true", help="of all threads, not wall clock")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(argv)
    clock = time.process_time if options.cpu_time else time.perf_counter
    machine = Machine(options.rows, options.context, options.gamma, getattr(torch, options.dtype))
    counts = {"draft": 0, "one verifies": 1, "all verify": options.rows}
    kinds = {kind: counts[kind] for kind in options.kinds}
    lists = {
        name: machine.lists(source, page, options.tokens, extra)
        for name, (source, page, extra) in CONTEXTS.items()
        if name in options.contexts
    }
    times: dict[str, dict[str, list[float]]] = {
        name: {kind: [] for kind in kinds} for name in lists
    }
    with torch.inference_mode():
        for context in lists.values():
            machine.step(context, options.rows, clock)
        for _ in range(options.repeats):
            for kind, verifies in kinds.items():
                for name, context in lists.items():
                    times[name][kind].append(machine.step(context, verifies, clock))
    print(f"{'ms, least (median)':28}" + "".join(f"{kind:>20}" for kind in kinds))
    for name, by_kind in times.items():
        cells = (f"{min(t):.1f} ({statistics.median(t):.1f})" for t in by_kind.values())
        print(f"{name:28}" + "".join(f"{cell:>20}" for cell in cells))
    if options.out:
        result = {
            **provenance(["bench/cpu_contexts.py", *(argv or sys.argv[1:])]),
            "rows": options.rows,
            "context": options.context,
            "tokens": options.tokens,
            "gamma": options.gamma,
            "dtype": options.dtype,
            "clock": "CPU time of all threads" if options.cpu_time else "wall",
            "milliseconds": times,
        }
        options.out.write_text(json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
