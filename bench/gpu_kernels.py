"""Time the Triton kernels on a CUDA device, each replayed from a CUDA graph.

Usage: ``python -m bench.gpu_kernels [--output FILE] [--commit ID]``. Prints, per kernel and shape,
the bytes that it must move, the time that these take on the device's memory bus, and the measured
time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton

from aspire_sglang.cli.machine import commit, describe_machine, describe_versions
from aspire_sglang.context import PageLists, SelectionConfig
from aspire_sglang.context import select_pages as torch_select_pages
from aspire_sglang.context.layer_lists import LayerLists
from aspire_sglang.kernels.greedy_accept import accept_greedy
from aspire_sglang.kernels.layer_selection import scratch_size, select_own, select_shared
from aspire_sglang.kernels.layer_tables import build_layer_tables
from aspire_sglang.kernels.page_lse import page_lse
from aspire_sglang.kernels.page_scores import page_scores
from aspire_sglang.kernels.page_selection import select_pages
from aspire_sglang.kernels.page_tables import build_tables
from aspire_sglang.kernels.refresh_tables import refresh_tables
from aspire_sglang.kernels.vote_rows import VoteRows

GAMMA = 16
WIDE_PAGES = 8_192
"""Pages of a score row on a server for contexts of 131,072 tokens."""
LIST_LAYERS = (1, 3, 5)
"""Neighbouring layers that share their own pages, of ``LAYERS`` in all."""
LAYERS = 30
VERIFY_EVERY = 9
"""Every ninth row verifies: it has two voters, reads its whole context and judges 8 drafts."""


@dataclass(frozen=True)
class Shape:
    """A decode batch of one layer; ``server_tokens``: longest context the server is set up for."""

    name: str
    heads: int
    kv_heads: int
    dim: int
    rows: int
    tokens: int
    server_tokens: int
    page_size: int = 16


SHAPES = (
    Shape("SmolLM2-135M, 256 x 7,000", 9, 3, 64, 256, 7_000, 8_192),
    Shape("Qwen3-8B, 24 x 30,000", 32, 8, 128, 24, 30_000, 40_960),
)


class Batch:
    """Random device inputs of one shape: pages shuffled over the pool, every ninth row a verify
    row."""

    def __init__(self, shape: Shape, device: str = "cuda") -> None:
        self.shape = shape
        size = shape.page_size
        self.config = SelectionConfig(page_size=size)
        pages = -(-shape.tokens // size)
        self.pages = pages
        num_slots = shape.rows * pages * size
        self.k = torch.randn(
            num_slots, shape.kv_heads, shape.dim, dtype=torch.bfloat16, device=device
        )
        order = torch.randperm(shape.rows * pages, device=device).view(shape.rows, pages, 1)
        slots = order * size + torch.arange(size, device=device)
        self.req_to_token = torch.zeros(
            shape.rows, shape.server_tokens, dtype=torch.int32, device=device
        )
        self.req_to_token[:, : pages * size] = slots.flatten(1).int()
        self.verify = torch.arange(shape.rows, device=device) % VERIFY_EVERY == 0
        self.draft = ~self.verify
        self.q_lens = torch.where(self.verify, VERIFY_EVERY, 1)
        self.qo_indptr = torch.nn.functional.pad(self.q_lens.cumsum(0), (1, 0)).int()
        self.lens = torch.full((shape.rows,), shape.tokens, device=device)
        total = int(self.qo_indptr[-1])
        self.q = torch.randn(total, shape.heads, shape.dim, dtype=torch.bfloat16, device=device)
        # Of random vectors, about what the log-sum-exp over the context is.
        spread = torch.rand(shape.heads, total, device=device)
        self.lse = (torch.tensor(float(shape.tokens)).log().item() + 0.5 + spread).T
        first = self.qo_indptr[:-1]
        last = torch.where(self.verify, self.qo_indptr[1:] - 1, -1)
        row = torch.repeat_interleave(torch.arange(shape.rows, device=device), self.q_lens)
        offset = torch.arange(total, device=device) - self.qo_indptr[1:][row]
        self.slots = torch.arange(shape.rows, dtype=torch.int32, device=device)
        self.rows = VoteRows(
            self.slots, torch.stack([first, last], 1).int().contiguous(), self.lens[row] + offset
        )
        width = self.config.num_pages(shape.server_tokens)
        self.scores = torch.rand(shape.rows, width, device=device)
        self.lists = PageLists(shape.rows, self.config.budget_pages(width), self.config, device)
        self.table = torch.zeros_like(self.req_to_token)
        self.seqlens = torch.zeros(shape.rows, dtype=torch.int32, device=device)
        self.budget = self.config.budget_pages(pages)


def tasks(batch: Batch) -> Iterator[tuple[str, float, Callable[[], Any]]]:
    """Per kernel its name, the bytes it must move, and the call."""
    b, shape = batch, batch.shape
    rows, contexts = shape.rows, shape.rows * shape.tokens
    keys = contexts * (shape.kv_heads * shape.dim * 2 + 4)
    options: dict[str, Any] = {"page_size": shape.page_size, "scale": shape.dim**-0.5}
    scores = torch.zeros_like(b.scores)
    inputs = (b.q, b.lse, b.k, b.req_to_token, b.rows, scores)
    yield "page_scores", keys + 4.0 * rows * b.pages, partial(page_scores, *inputs, **options)
    voters = rows + int(b.verify.sum())
    for heads in (shape.kv_heads, shape.heads):
        out = torch.zeros(rows, 2, heads, b.pages, device=b.q.device)
        lse = b.lse if heads == shape.kv_heads else None
        yield (
            "page_lse per KV head" if lse is not None else "page_lse per head",
            keys + 4.0 * voters * heads * b.pages,
            partial(page_lse, b.q, b.k, b.req_to_token, b.rows, out, lse=lse, **options),
        )
    # Small tensors stay in the L2 cache here, as they do between the kernels of a step.
    chosen = 4.0 * rows * (b.pages + b.budget)
    yield "select_pages", chosen, lambda: select_pages(b.scores, b.lens, b.slots, b.lists)
    wide = torch.rand(rows, WIDE_PAGES, device=b.q.device)
    lists = PageLists(rows, b.config.budget_pages(WIDE_PAGES), b.config, wide.device)
    yield "select_pages, 131k server", chosen, lambda: select_pages(wide, b.lens, b.slots, lists)
    yield (
        "select_pages, torch.topk",
        chosen,
        lambda: torch_select_pages(b.scores, b.lens, b.config),
    )
    sparse = 8.0 * rows * b.budget * shape.page_size
    full, some = torch.zeros_like(b.draft), b.draft
    tables = (b.lists, b.table, b.seqlens)
    for name, draft in (("drafts", ~full), ("full", full), ("one ninth full", some)):
        share = float(draft.float().mean())
        yield (
            f"build_tables, {name}",
            share * sparse + (1 - share) * 8.0 * contexts,
            partial(build_tables, b.req_to_token, b.slots, b.lens, draft, *tables),
        )
    yield (
        "refresh_tables",
        chosen + float(some.float().mean()) * sparse,
        lambda: refresh_tables(b.scores, b.req_to_token, b.slots, b.lens, some, *tables),
    )
    for list_layers in LIST_LAYERS:
        yield from _layered(b, list_layers, chosen, sparse, float(some.float().mean()))
    yield "accept_greedy", 16.0 * rows * (GAMMA + 4), _accept(b)


def _layered(
    b: Batch, list_layers: int, chosen: float, sparse: float, drafts: float
) -> Iterator[tuple[str, float, Callable[[], Any]]]:
    """The votes of verify rows and the lists of groups of layers, a step's worth of each.

    Args:
        chosen, sparse: bytes of a selection and of a table, of all rows.
        drafts: share of the rows that draft.
    """
    shape, device = b.shape, b.q.device
    number = -(-LAYERS // list_layers)
    name = f"{number} lists"
    verifying = torch.where(b.verify, b.slots, -1).int()
    votes = VoteRows(verifying, b.rows.voters, b.rows.positions)
    scores = torch.zeros(number, *b.scores.shape, device=device)
    options: dict[str, Any] = {"page_size": shape.page_size, "scale": shape.dim**-0.5}

    def vote() -> None:
        for part in scores:
            page_scores(b.q, b.lse, b.k, b.req_to_token, votes, part, **options)

    keys = shape.rows * shape.tokens * (shape.kv_heads * shape.dim * 2 + 4.0)
    yield f"page_scores of verify rows, {name}", number * (1 - drafts) * keys, vote
    longest = b.config.budget_pages(b.scores.shape[1])
    lists = LayerLists(shape.rows, number, longest, b.config, 0.5, device)
    scratch = torch.zeros(scratch_size(lists, shape.rows), dtype=torch.int32, device=device)
    # Lists of everybody, so that tables are those of a running server.
    select_shared(b.scores, b.lens, b.slots, lists, scratch)
    select_own(torch.rand(scores.shape, device=device), b.lens, b.slots, lists, scratch)
    if list_layers == 1:
        shared = partial(select_shared, b.scores, b.lens, b.slots, lists, scratch)
        yield "select_shared", chosen, shared
    own = partial(select_own, scores, b.lens, verifying, lists, scratch)
    yield f"select_own, {name}", number * (1 - drafts) * chosen, own
    tables = torch.zeros(number, *b.table.shape, dtype=torch.int32, device=device)
    rows = (b.req_to_token, b.slots, b.lens, b.draft, lists, tables, b.seqlens)
    whole = 8.0 * (1 - drafts) * shape.rows * shape.tokens
    before, after = range(-(-number // 2)), range(number // 2, number)
    yield (
        f"build_layer_tables before, {name}",
        number * whole + len(before) * drafts * sparse,
        partial(build_layer_tables, *rows, draft_lists=before),
    )
    yield (
        f"build_layer_tables after, {name}",
        len(after) * drafts * sparse,
        partial(build_layer_tables, *rows, draft_lists=after, full_rows=False),
    )


def _accept(b: Batch) -> Callable[[], None]:
    """Repeated calls find no drafts to judge; the kernel is all latency either way."""
    rows, device = b.shape.rows, b.q.device
    return partial(
        accept_greedy,
        target_tokens=torch.randint(0, 2, (int(b.qo_indptr[-1]),), device=device),
        qo_indptr=b.qo_indptr,
        slots=b.slots,
        draft=~b.verify,
        drafts=torch.randint(0, 2, (rows, GAMMA), device=device),
        pending=torch.where(b.verify, VERIFY_EVERY - 1, 3).int(),
        bonus=torch.zeros(rows, dtype=torch.int64, device=device),
        seq_lens=b.lens.clone(),
        tokens=torch.zeros(rows, GAMMA + 1, dtype=torch.int64, device=device),
        accept_len=torch.zeros(rows, dtype=torch.int32, device=device),
    )


def graph_time(call: Callable[[], Any], launches: int = 20, repeats: int = 15) -> tuple[float, ...]:
    """Median, least and greatest seconds per call, replayed from a graph of ``launches`` calls."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(launches):
            call()
    graph.replay()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / launches)
    return statistics.median(times), min(times), max(times)


def bus_bandwidth() -> float:
    """Bytes per second of the device's memory bus: no kernel can be faster."""
    properties = torch.cuda.get_device_properties()
    return 2 * properties.memory_clock_rate * 1e3 * properties.memory_bus_width / 8


def copy_bandwidth() -> float:
    """Bytes per second, read plus written, of a large elementwise kernel."""
    source = torch.randn(1 << 29, device="cuda")
    target = torch.empty_like(source)
    call = partial(torch.mul, source, 2.0, out=target)
    return 2 * source.numel() * 4 / graph_time(call, launches=4)[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    parser.add_argument("--commit", help="commit of the code, where there is no git checkout")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench.gpu_kernels needs a CUDA device.", file=sys.stderr)
        return 1
    bandwidth, copied = bus_bandwidth(), copy_bandwidth()
    print(
        f"{torch.cuda.get_device_name()}: memory bus {bandwidth / 1e12:.2f} TB/s, "
        f"copy kernel {copied / 1e12:.2f} TB/s"
    )
    results = []
    for shape in SHAPES:
        print(f"\n{shape.name}: us, MB, floor us, ratio, TB/s")
        for name, needed, call in tasks(Batch(shape)):
            seconds, least, greatest = graph_time(call)
            floor = needed / bandwidth
            results.append(
                {
                    "shape": asdict(shape),
                    "kernel": name,
                    "seconds": seconds,
                    "seconds_min": least,
                    "seconds_max": greatest,
                    "bytes": needed,
                    "floor_seconds": floor,
                }
            )
            print(
                f"{name:38} {seconds * 1e6:8.1f} {needed / 1e6:8.1f} {floor * 1e6:8.1f} "
                f"{seconds / floor:6.2f} {needed / seconds / 1e12:6.2f}",
                flush=True,
            )
        torch.cuda.empty_cache()
    if arguments.output:
        report = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "commit": arguments.commit or commit(Path(__file__).parents[1]),
            "machine": describe_machine() | {"gpu": torch.cuda.get_device_name()},
            "versions": describe_versions() | {"triton": triton.__version__},
            "bus_bandwidth": bandwidth,
            "copy_bandwidth": copied,
            "results": results,
        }
        arguments.output.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
