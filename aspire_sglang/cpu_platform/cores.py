"""Cores and memory of this machine, shared out between the processes that hold model ranks.

SGLang gives each tensor-parallel rank a NUMA node and binds its threads with kernels of its own CPU
engine. Here ranks share the cores whatever the nodes: without that, two ranks would each run a
thread per core, and wait for each other's time slices at every layer.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

import torch

logger = logging.getLogger(__name__)

ENV_BIND = "SGLANG_CPU_OMP_THREADS_BIND"
"""SGLang's own variable: the cores of each rank as ``0-15|16-31``; ``all`` or unset: not bound."""


def cores_of_rank(*, tp_rank: int, tp_size: int) -> list[int] | None:
    """REPLACE ``init_threads_binding``: the cores that the user bound this rank to, None for none.

    Raises:
        ValueError: the variable does not name cores of this machine for each rank.
    """
    binding = os.environ.get(ENV_BIND, "all")
    if binding == "all":
        return None
    ranks = binding.split("|")
    if len(ranks) != tp_size:
        raise ValueError(f"{ENV_BIND}={binding} names {len(ranks)} ranks; --tp-size is {tp_size}.")
    try:
        cores = _parse(ranks[tp_rank])
    except ValueError:
        raise ValueError(f"{ENV_BIND}={binding}: write cores as 0-15|16-31.") from None
    strange = [core for core in cores if core not in os.sched_getaffinity(0)]
    if strange or not cores:
        raise ValueError(f"{ENV_BIND}={binding}: there is no core {strange} for this process.")
    return cores


def _parse(text: str) -> list[int]:
    cores: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        cores += range(int(first), int(last or first) + 1)
    return cores


def use_cores(*, tp_size: int, tp_rank: int, local_omp_cpuid: list[int] | None) -> None:
    """REPLACE ``_init_cpu_threads_env``: run as many threads as this process has cores for itself.

    PyTorch's operators and our kernels run on the same team of threads, see
    :mod:`aspire_sglang.attention.openmp`. A number given as ``OMP_NUM_THREADS`` holds for every
    process.
    """
    if local_omp_cpuid is not None:
        for thread in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(thread), local_omp_cpuid)
        torch.set_num_threads(len(local_omp_cpuid))
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, torch.get_num_threads() // _ranks_here()))
    logger.info("aspire-cpu: %d threads for this rank", torch.get_num_threads())


def _ranks_here() -> int:
    """Processes of this server that hold a rank on this machine, replicas included."""
    from sglang.srt.runtime_context import get_server_args

    args = get_server_args()
    return max(1, args.tp_size * args.dp_size // args.nnodes)


def available_memory(
    original: Callable[..., float], device: str, *args: Any, **kwargs: Any
) -> float:
    """AROUND ``get_available_gpu_memory``: a rank's share of the free memory, in GB.

    SGLang's is the share of a NUMA node: several ranks on a node would each take all of it.
    """
    from sglang.srt.utils.common import get_cpu_ids_by_node

    memory = original(device, *args, **kwargs)
    if device != "cpu":
        return memory
    nodes = len(get_cpu_ids_by_node())
    return memory * nodes / max(nodes, _ranks_here())
