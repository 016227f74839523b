"""Two tensor-parallel ranks on one GPU, to look for faults where there is no second one.

NCCL refuses to serve two ranks of one GPU. What ranks send each other travels through the host over
gloo instead, so no step can be captured in a CUDA graph, and times say nothing. Everything else is
what two GPUs run: the ranks' shares of weights and heads, the kernels, the scheduler, the checks.
"""

from __future__ import annotations

import functools
import sys
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist


def share_one_gpu() -> None:
    """Called in every process of an engine before it loads its model."""
    from sglang.srt.distributed import bootstrap, parallel_state

    from aspire_sglang.cpu_platform.parallel import model_parallel_group

    engine: Any = sys.modules.get("sglang.srt.entrypoints.engine")
    if engine is not None:
        engine.maybe_reindex_device_id = lambda gpu: nullcontext(0)
    setattr(bootstrap, "_resolve_backend", lambda **_: "gloo")  # noqa: B010
    original = parallel_state.init_model_parallel_group
    parallel_state.init_model_parallel_group = functools.partial(model_parallel_group, original)
    group: Any = parallel_state.GroupCoordinator
    group._all_reduce_in_place = _all_reduce
    group._all_gather_into_tensor = _all_gather


def _all_reduce(group: Any, values: torch.Tensor) -> None:
    on_host = values.float().cpu()
    dist.all_reduce(on_host, group=group.cpu_group)
    values.copy_(on_host)


def _all_gather(group: Any, everything: torch.Tensor, values: torch.Tensor) -> None:
    own = values.contiguous().cpu().view(torch.uint8)
    found = torch.empty((group.world_size, *own.shape), dtype=torch.uint8)
    dist.all_gather(list(found.unbind()), own, group=group.cpu_group)
    everything.copy_(found.view(values.dtype).view(everything.shape))
