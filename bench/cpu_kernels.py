"""Times of the CPU attention kernels and packed linears, beside PyTorch's own operators.

    python bench/cpu_kernels.py                      # everything, float32 and bfloat16
    python bench/cpu_kernels.py --only draft plain --dtype float32 --context 16000

Every case cycles through several layers so that no KV stays in a cache between calls, and
alternates its variants inside one loop, so that a busy machine is unfair to all of them alike.
"copies" is the time relative to copying the KV bytes that the case reads. On a machine shared
with others, ``--cpu-time`` counts the CPU time of one thread, which their load hardly changes.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

# Threads that wait by spinning hold up every operator for a time slice when another process wants
# their core: on a busy machine that costs more than all the arithmetic.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from aspire_sglang.attention.cpu_attention import CpuAttention
from aspire_sglang.attention.cpu_plan import Row
from aspire_sglang.cpu_platform.packed_linear import layouts

Call = Callable[[int], object]


@dataclass(frozen=True)
class Setup:
    """Model shape and amount of work."""

    heads: int
    kv_heads: int
    dim: int
    context: int
    rows: int
    budget: int
    layers: int
    dtype: torch.dtype

    @property
    def num_slots(self) -> int:
        return self.rows * (self.context + 64)

    def attention(self) -> CpuAttention:
        return CpuAttention(self.heads, self.kv_heads, self.num_slots, self.dim, self.dtype)

    @property
    def scale(self) -> float:
        return self.dim**-0.5

    def pools(self) -> list[tuple[Tensor, Tensor]]:
        shape = (self.kv_heads, self.num_slots, self.dim)
        return [
            (torch.randn(shape).to(self.dtype), torch.randn(shape).to(self.dtype))
            for _ in range(self.layers)
        ]

    def query(self, tokens: int) -> Tensor:
        return torch.randn(tokens, self.heads, self.dim).to(self.dtype)

    def kv_bytes(self, tokens: int) -> int:
        return 2 * tokens * self.kv_heads * self.dim * self.dtype.itemsize


def measure(
    variants: dict[str, Call], layers: int, seconds: float, clock: Callable[[], float]
) -> dict[str, float]:
    """Median microseconds per call, the variants alternating."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    with torch.inference_mode():
        for call in variants.values():
            call(0)
        start = time.perf_counter()
        turn = 0
        while turn < 5 or (time.perf_counter() - start < seconds and turn < 300):
            for index, (name, call) in enumerate(variants.items()):
                # Another layer for every variant: none finds what the one before it has read.
                layer = (turn + index * layers // len(variants)) % layers
                begin = clock()
                call(layer)
                times[name].append((clock() - begin) * 1e6)
            turn += 1
    return {name: statistics.median(values) for name, values in times.items()}


def grouped(keys: Tensor, heads: int) -> Tensor:
    """``[Hkv, L, D]`` as ``[Hkv, group, L, D]`` without a copy."""
    return keys.unsqueeze(1).expand(-1, heads // keys.shape[0], -1, -1)


def copy_call(pools: list[tuple[Tensor, Tensor]], tokens: int) -> Call:
    k = pools[0][0]
    target = torch.empty(2, k.shape[0], tokens, k.shape[2], dtype=k.dtype)

    def call(layer: int) -> None:
        target[0].copy_(pools[layer][0][:, :tokens])
        target[1].copy_(pools[layer][1][:, :tokens])

    return call


def full_case(
    setup: Setup, pools: list[tuple[Tensor, Tensor]], queries: int, refresh: bool = False
) -> dict[str, Call]:
    """One row over the whole context, in place, against scaled_dot_product_attention."""
    q = setup.query(queries)
    slots = torch.arange(setup.context, dtype=torch.int32)
    attention = setup.attention()
    plan = attention.plan([Row(slots, queries, (queries - 1,) if refresh else ())])
    out = torch.empty_like(q)
    heads = setup.heads
    mask = torch.ones(queries, setup.context, dtype=torch.bool).tril(setup.context - queries)

    def ours(layer: int) -> Tensor:
        return attention.attend(q, *pools[layer], plan, setup.scale, out)

    def scores(layer: int) -> object:
        ours(layer)
        return attention.page_scores(plan, 16)

    def sdpa(layer: int) -> Tensor:
        k, v = (grouped(pool[:, : setup.context], heads) for pool in pools[layer])
        x = q.view(queries, setup.kv_heads, -1, setup.dim).permute(1, 2, 0, 3)
        if queries == 1:
            return F.scaled_dot_product_attention(x, k, v)
        if queries == setup.context:
            return F.scaled_dot_product_attention(x, k, v, is_causal=True)
        return F.scaled_dot_product_attention(x, k, v, attn_mask=mask)

    return {"ours with page scores": scores} if refresh else {"ours": ours, "SDPA": sdpa}


def draft_case(setup: Setup, pools: list[tuple[Tensor, Tensor]]) -> dict[str, Call]:
    """Draft rows on scattered 16-token pages, against gathering and batched products."""
    pages = setup.context // 16
    chosen = [torch.randperm(pages)[: setup.budget // 16].sort()[0] for _ in range(setup.rows)]
    table = (torch.stack(chosen).unsqueeze(-1) * 16 + torch.arange(16)).flatten(1)
    table += torch.arange(setup.rows).unsqueeze(1) * setup.context
    attention = setup.attention()
    plan = attention.plan([Row(row, 1) for row in table.int()])
    q = setup.query(setup.rows)
    flat = table.flatten()

    def ours(layer: int) -> Tensor:
        return attention.attend(q, *pools[layer], plan, setup.scale)

    def gather(layer: int) -> Tensor:
        k, v = (pool.index_select(1, flat) for pool in pools[layer])
        shape = (setup.kv_heads, setup.rows, -1, setup.dim)
        x = q.view(setup.rows, setup.kv_heads, -1, setup.dim).transpose(0, 1)
        scores = torch.matmul(x, k.view(shape).transpose(2, 3)) * setup.scale
        return torch.matmul(torch.softmax(scores, -1), v.view(shape))

    return {"ours": ours, "index_select + matmul": gather}


def attention_tables(
    setup: Setup, only: set[str], seconds: float, clock: Callable[[], float]
) -> Iterator[tuple[str, int, dict[str, float]]]:
    """Name, KV bytes and times of every attention case."""
    pools = setup.pools()
    total = setup.kv_bytes(setup.context)
    chunk = min(512, setup.context // 2)
    cases: list[tuple[str, int, int, Callable[[], dict[str, Call]]]] = [
        ("plain", setup.context, total, lambda: full_case(setup, pools, 1)),
        ("refresh", setup.context, total, lambda: full_case(setup, pools, 1, refresh=True)),
    ]
    for queries in (5, 9, 17):
        case = partial(full_case, setup, pools, queries)
        cases.append((f"verify {queries}", setup.context, total, case))
    drafted = setup.rows * setup.budget
    cases.append(
        (
            f"draft {setup.rows} x {setup.budget}",
            drafted,
            setup.kv_bytes(drafted),
            lambda: draft_case(setup, pools),
        )
    )
    cases.append((f"extend {chunk}", setup.context, total, lambda: full_case(setup, pools, chunk)))
    cases.append(("prefill", setup.context, total, lambda: full_case(setup, pools, setup.context)))
    for name, tokens, size, build in cases:
        if not only or name.split()[0] in only:
            variants = {"copy": copy_call(pools, tokens), **build()}
            yield name, size, measure(variants, setup.layers, seconds, clock)


def linear_tables(
    dtype: torch.dtype, seconds: float, clock: Callable[[], float]
) -> Iterator[tuple[str, int, dict[str, float]]]:
    """SmolLM2's four linears and its lm_head, plain and packed."""
    shapes = {
        "layer linears": [(960, 576), (576, 576), (3072, 576), (576, 1536)],
        "lm_head": [(49152, 576)],
    }
    for label, sizes in shapes.items():
        layers = 8 if label != "lm_head" else 1
        weights = [[torch.randn(s).to(dtype) for s in sizes] for _ in range(layers)]
        packed = {
            kind.__name__: [[kind(w) for w in layer] for layer in weights]
            for kind in layouts(dtype)
        }
        size = sum(w.nbytes for w in weights[0])
        for rows in (1, 8, 16, 24, 256):
            inputs = [torch.randn(rows, s[1]).to(dtype) for s in sizes]

            def plain(layer: int, inputs: list[Tensor] = inputs, weights: list = weights) -> None:
                for x, w in zip(inputs, weights[layer], strict=True):
                    F.linear(x, w)

            def pack(layer: int, packed: list, inputs: list[Tensor] = inputs) -> None:
                for x, linear in zip(inputs, packed[layer], strict=True):
                    linear(x)

            def copy(layer: int, weights: list = weights) -> None:
                for w in weights[layer]:
                    w.clone()

            variants: dict[str, Call] = {"copy": copy, "F.linear": plain}
            variants |= {kind: partial(pack, packed=copies) for kind, copies in packed.items()}
            yield f"{label} m={rows}", size, measure(variants, layers, seconds, clock)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--heads", type=int, default=9, help="query heads (default 9)")
    parser.add_argument("--kv-heads", type=int, default=3, help="KV heads (default 3)")
    parser.add_argument("--dim", type=int, default=64, help="head size (default 64)")
    parser.add_argument("--context", type=int, default=6016, help="tokens of a row's context")
    parser.add_argument("--rows", type=int, default=8, help="draft rows (default 8)")
    parser.add_argument("--budget", type=int, default=560, help="tokens of a draft row's list")
    parser.add_argument("--layers", type=int, default=8, help="layers to cycle through")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], action="append")
    parser.add_argument("--seconds", type=float, default=1.0, help="time per case (default 1)")
    parser.add_argument("--threads", type=int, help="default: PyTorch's own choice")
    parser.add_argument("--cpu-time", action="store_true", help="CPU time of one thread")
    parser.add_argument(
        "--only",
        nargs="*",
        default=[],
        choices=["plain", "refresh", "verify", "draft", "extend", "prefill", "linear"],
    )
    args = parser.parse_args()
    only = set(args.only)
    clock = time.perf_counter
    if args.cpu_time:
        args.threads, clock = 1, time.thread_time
    if args.threads:
        torch.set_num_threads(args.threads)
    print(f"{torch.get_num_threads()} threads, PyTorch {torch.__version__}")
    print(f"{'case':22}{'variant':24}{'us':>9}{'GB/s':>8}{'copies':>8}")
    for name in args.dtype or ["float32", "bfloat16"]:
        dtype = getattr(torch, name)
        print(name)
        setup = Setup(
            args.heads,
            args.kv_heads,
            args.dim,
            args.context,
            args.rows,
            args.budget,
            args.layers,
            dtype,
        )
        tables: list[Iterator[tuple[str, int, dict[str, float]]]] = []
        if not only or only - {"linear"}:
            tables.append(attention_tables(setup, only, args.seconds, clock))
        if not only or "linear" in only:
            tables.append(linear_tables(dtype, args.seconds, clock))
        for table in tables:
            for case, size, times in table:
                for variant, us in times.items():
                    speed = f"{size / us / 1e3:8.1f}{us / times['copy']:8.1f}"
                    print(f"{case:22}{variant:24}{us:9.0f}{speed}", flush=True)


if __name__ == "__main__":
    main()
