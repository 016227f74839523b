"""Two tensor-parallel ranks as two processes, over gloo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from aspire_sglang.cli.server import free_port
from aspire_sglang.runtime.ranks import Ranks

SIZE = 2


def on_two_ranks(observe: Callable[[Ranks], Any]) -> list[Any]:
    """What a function of a module finds on each rank, in a process of its own."""
    with mp.get_context("spawn").Manager() as manager:
        found = manager.dict()
        mp.spawn(_run, args=(free_port(), observe, found), nprocs=SIZE)
        return [found[rank] for rank in range(SIZE)]


def _run(rank: int, port: int, observe: Callable[[Ranks], Any], found: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=SIZE
    )
    found[rank] = observe(Ranks(dist.group.WORLD))
    dist.destroy_process_group()
