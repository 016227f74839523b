"""Time of one attention layer over a mixed batch on a GPU, per implementation.

    python -m bench.gpu_attention                       # everything, a table and a JSON file
    python -m bench.gpu_attention --shapes B --page-sizes 16 --implementations fa3 triton

A graph of four layers with a KV pool each is replayed, so neither the launches nor the cache
flatter a figure. Every case is first compared with a float64 reference on some of its rows.
"bytes" is what must be read and written at least, "floor" those bytes at the rate of a device
copy. ``stock`` is the call that SGLang's own ``fa3`` backend makes: splits are left to the library,
and the schedule is computed beforehand for single queries only.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from aspire_sglang.attention.fa3_mixed import Fa3MixedAttention
from aspire_sglang.attention.mixed import (
    PAGE_SIZES,
    AttentionSpec,
    HostLengths,
    MixedAttention,
    MixedPlan,
    MixedStep,
    create_mixed_attention,
)
from aspire_sglang.cli.machine import commit

LAYERS = 4
REPLAYS = 20
# A draft row reads this share of its pages of 16 tokens, but not fewer than that many.
DRAFT_RATIO, DRAFT_MIN_PAGES, DRAFT_PAGE = 0.07, 32, 16
VERIFY_TOKENS = 9
CALLS = ("fa3", "stock", "triton", "flashinfer")
MIXES = ("plain", "draft", "verify", "ninth", "draft in a wide graph")
# Rounding of probabilities and of the output to bfloat16.
MAX_ERROR = 1e-2
# Logits are summed in float32; one token left out shows here long before it does in the output.
MAX_LSE_ERROR = 1e-3
PACKAGES = ("torch", "triton", "sglang-kernel", "flashinfer-python")


@dataclass(frozen=True)
class Shape:
    """A model's heads and a batch of equal requests."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rows: int
    context: int


SHAPES = {
    "A": Shape("A: SmolLM2-135M, 256 x 7,000", 9, 3, 64, 256, 7000),
    "B": Shape("B: Qwen3-8B, 24 x 30,000", 32, 8, 128, 24, 30000),
}


@dataclass(frozen=True)
class Result:
    """One measured case; times of one layer."""

    shape: str
    page_size: int
    mix: str
    implementation: str
    bytes: int
    floor_us: float
    time_us: float
    spread_us: float
    tb_per_s: float
    error: float
    lse_error: float


class Batch:
    """Pools of a shape, and the tables and lengths of its steps."""

    def __init__(self, shape: Shape, page_size: int, dtype: torch.dtype = torch.bfloat16):
        self.shape = shape
        self.page_size = page_size
        self.width = -(-shape.context // page_size)
        pages = shape.rows * self.width
        size = (LAYERS, pages * page_size, shape.num_kv_heads, shape.head_dim)
        self.k = torch.randn(size, dtype=dtype, device="cuda")
        self.v = torch.randn(size, dtype=dtype, device="cuda")
        order = torch.randperm(pages, device="cuda", dtype=torch.int32)
        self.table = order.view(shape.rows, self.width)

    def step(self, mix: str) -> tuple[MixedStep, list[int]]:
        """The step of a mix, and its query tokens per row."""
        shape = self.shape
        verify = {
            "plain": range(0),
            "verify": range(shape.rows),
            "ninth": range(0, shape.rows, VERIFY_TOKENS),
        }.get(mix, range(0))
        draft = set() if mix in ("plain", "verify") else set(range(shape.rows)) - set(verify)
        table = self.table.clone()
        q_lens, lengths = [], []
        for row in range(shape.rows):
            q_lens.append(VERIFY_TOKENS if row in verify else 1)
            lengths.append(shape.context)
            if row in draft:
                lengths[-1] = self._choose(table, row)
        starts = [0]
        for q_len in q_lens:
            starts.append(starts[-1] + q_len)
        wide = mix.startswith("draft in")
        step = MixedStep(
            page_table=table,
            cache_seqlens=torch.tensor(lengths, dtype=torch.int32, device="cuda"),
            cu_seqlens_q=torch.tensor(starts, dtype=torch.int32, device="cuda"),
            max_seqlen_q=VERIFY_TOKENS if wide else max(q_lens),
            host=HostLengths(lengths, starts),
        )
        return step, q_lens

    def _choose(self, table: Tensor, row: int) -> int:
        """Give a row a sparse context that ends with its last page; returns its length."""
        pages_of_16 = -(-self.shape.context // DRAFT_PAGE)
        tokens = max(DRAFT_MIN_PAGES, round(DRAFT_RATIO * pages_of_16)) * DRAFT_PAGE
        count = min(self.width, -(-tokens // self.page_size))
        middle = torch.randperm(self.width - 2, device="cuda")[: count - 2] + 1
        edges = torch.tensor([0, self.width - 1], device="cuda")
        chosen = torch.cat([middle, edges]).sort().values
        table[row, :count] = self.table[row, chosen]
        empty = self.width * self.page_size - self.shape.context
        return count * self.page_size - empty

    def least_bytes(self, step: MixedStep) -> int:
        """Bytes that one layer must move: keys, values, queries, outputs, page numbers."""
        shape = self.shape
        assert step.host is not None
        tokens = sum(step.host.cache_seqlens)
        kv = 2 * tokens * shape.num_kv_heads * shape.head_dim * self.k.element_size()
        queries = 2 * step.host.cu_seqlens_q[-1] * shape.num_heads * shape.head_dim * 2
        return kv + queries + 4 * sum(-(-n // self.page_size) for n in step.host.cache_seqlens)


def reference(
    spec: AttentionSpec, step: MixedStep, row: int, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    """Output ``[Q, Hq, D]`` and log-sum-exp ``[Q, Hq]`` of one row, in float64."""
    assert step.host is not None
    first, last = step.host.cu_seqlens_q[row : row + 2]
    length = step.host.cache_seqlens[row]
    at = torch.arange(length, device=q.device)
    place = step.page_table[row, at // spec.page_size].long() * spec.page_size + at % spec.page_size
    keys = k[place].double().repeat_interleave(spec.group, 1)
    values = v[place].double().repeat_interleave(spec.group, 1)
    logits = torch.einsum("qhd,nhd->qhn", q[first:last].double(), keys) * spec.scale
    own = torch.arange(length - (last - first), length, device=q.device)
    logits = logits.masked_fill(at > own[:, None, None], float("-inf"))
    return torch.einsum("qhn,nhd->qhd", logits.softmax(-1), values), logits.logsumexp(-1)


def check(
    spec: AttentionSpec, plan: MixedPlan, step: MixedStep, q: Tensor, k: Tensor, v: Tensor
) -> tuple[float, float]:
    """Relative error of the output and absolute error of the log-sum-exp, worst of some rows."""
    out = torch.full_like(q, float("nan"))
    _, lse = plan.run(q, k, v, out=out, return_lse=True)
    assert lse is not None
    assert step.host is not None
    rows = step.num_rows
    worst = worst_lse = 0.0
    for row in {0, 1, rows // 2, rows // 9 * 9 % rows, rows - 1}:
        first, last = step.host.cu_seqlens_q[row : row + 2]
        exact, exact_lse = reference(spec, step, row, q, k, v)
        error = (out[first:last].double() - exact).norm() / exact.norm()
        lse_error = (lse[first:last].double() - exact_lse).abs().max()
        if not (error < MAX_ERROR and lse_error < MAX_LSE_ERROR):
            raise RuntimeError(f"row {row} is wrong: error {error:.1e}, of lse {lse_error:.1e}")
        worst, worst_lse = max(worst, error.item()), max(worst_lse, lse_error.item())
    if not out.isfinite().all():
        raise RuntimeError("an output was not written")
    return worst, worst_lse


def replay_us(record: Callable[[], object]) -> tuple[float, float]:
    """Median time of a replay of what ``record`` launches, and the width of the middle half."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        record()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        record()
    for _ in range(3):
        graph.replay()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(REPLAYS + 1)]
    marks[0].record()
    for mark in marks[1:]:
        graph.replay()
        mark.record()
    torch.cuda.synchronize()
    times = [a.elapsed_time(b) * 1e3 for a, b in pairwise(marks)]
    quarter = statistics.quantiles(times, n=4)
    return statistics.median(times), quarter[2] - quarter[0]


def copy_rate() -> float:
    """Bytes per second, read and written, of a kernel that copies 4 GiB."""
    source = torch.randn(2**30, dtype=torch.float32, device="cuda")
    target = torch.empty_like(source)
    time, _ = replay_us(lambda: torch.mul(source, 1.5, out=target))
    return 2 * source.numel() * 4 / (time * 1e-6)


def create(name: str, spec: AttentionSpec, queries: int) -> MixedAttention:
    if name == "stock":
        return Fa3MixedAttention(spec, num_splits=0, precompute=queries == 1)
    return create_mixed_attention(name, spec, max_seqlen_q=queries, device="cuda")


def measure(
    batch: Batch,
    name: str,
    spec: AttentionSpec,
    mix: str,
    rate: float,
) -> Result:
    step, _ = batch.step(mix)
    assert step.host is not None
    plan = create(name, spec, step.max_seqlen_q).plan(step)
    tokens = step.host.cu_seqlens_q[-1]
    q = torch.randn(LAYERS, tokens, spec.num_heads, spec.head_dim, dtype=spec.dtype, device="cuda")
    error, lse_error = check(spec, plan, step, q[0], batch.k[0], batch.v[0])
    out = torch.empty_like(q)

    def layers() -> None:
        for i in range(LAYERS):
            plan.run(q[i], batch.k[i], batch.v[i], out=out[i])

    time, spread = replay_us(layers)
    least = batch.least_bytes(step)
    return Result(
        shape=batch.shape.name,
        page_size=batch.page_size,
        mix=mix,
        implementation=name,
        bytes=least,
        floor_us=least / rate * 1e6,
        time_us=time / LAYERS,
        spread_us=spread / LAYERS,
        tb_per_s=least / time * LAYERS / 1e6,
        error=error,
        lse_error=lse_error,
    )


def line(result: Result, base: float | None) -> str:
    """One line of the table; ``base`` is the time of fa3."""
    name = f"{result.mix[:13]}, {result.implementation}"
    share = f"{base / result.time_us:8.2f}" if base else " " * 8
    return (
        f"{name:24}{result.bytes / 1e6:8.0f}{result.floor_us:10.0f}{result.time_us:9.1f}"
        f"{result.tb_per_s:7.2f}{share}{result.error:9.1e}"
    )


def versions() -> dict[str, str]:
    found = {"python": sys.version.split()[0], "cuda": str(torch.version.cuda)}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--page-sizes", nargs="+", type=int, choices=PAGE_SIZES, default=PAGE_SIZES)
    parser.add_argument("--mixes", nargs="+", choices=MIXES, default=MIXES)
    parser.add_argument("--implementations", nargs="+", choices=CALLS, default=CALLS)
    parser.add_argument("--json", type=Path, help="where to write the results")
    parser.add_argument("--commit", help="of the code, where it is no git checkout")
    args = parser.parse_args()
    torch.manual_seed(0)
    rate = copy_rate()
    print(f"{torch.cuda.get_device_name()}: device copy {rate / 1e12:.2f} TB/s, read and written")
    results: list[Result] = []
    for shape in (SHAPES[name] for name in args.shapes):
        for page_size in args.page_sizes:
            batch = Batch(shape, page_size)
            print(f"\n{shape.name}, pages of {page_size}", flush=True)
            print(f"{'':24}{'MB':>8}{'floor us':>10}{'us':>9}{'TB/s':>7}{'of fa3':>8}{'error':>9}")
            spec = AttentionSpec(
                shape.num_heads,
                shape.num_kv_heads,
                shape.head_dim,
                page_size,
                torch.bfloat16,
                torch.bfloat16,
                shape.head_dim**-0.5,
            )
            for mix in args.mixes:
                base = None
                for name in args.implementations:
                    try:
                        result = measure(batch, name, spec, mix, rate)
                    except RuntimeError as error:
                        print(f"{mix + ', ' + name:24}{str(error)[:70]}")
                        continue
                    results.append(result)
                    base = result.time_us if name == "fa3" else base
                    print(line(result, base), flush=True)
            del batch
            torch.cuda.empty_cache()
    if args.json:
        root = Path(__file__).resolve().parent.parent
        properties = torch.cuda.get_device_properties(0)
        document = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "commit": args.commit or commit(root),
            "machine": {
                "gpu": properties.name,
                "processors": properties.multi_processor_count,
                "memory_gib": round(properties.total_memory / 2**30),
                "copy_tb_per_s": rate / 1e12,
            },
            "versions": versions(),
            "results": [asdict(result) for result in results],
        }
        args.json.write_text(json.dumps(document, indent=1))
        print(f"written to {args.json}")


if __name__ == "__main__":
    main()
