"""The step-cost model at start-up: read from the last start's file, or measured and kept.

A fit belongs to one device, model and setting. On a GPU each has a file of its own in the cache
folder, so servers of different settings do not overwrite each other; a file given by name is used
by whoever names it, and refused, with the reasons, where it was fitted for something else. On a CPU
every start measures unless a file is named: the profile takes seconds, and what else runs on the
cores changes from start to start.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
from pathlib import Path
from typing import Any

import torch

from aspire_sglang import __version__
from aspire_sglang.runtime.cost import RunningCost
from aspire_sglang.runtime.profile import profile_steps
from aspire_sglang.speculation.cost_file import CostKey, load_cost_model, save_cost_model
from aspire_sglang.speculation.cost_model import CostModel
from aspire_sglang.speculation.forecast import describe as describe_forecasts
from aspire_sglang.speculation.forecast import forecasts

logger = logging.getLogger(__name__)


def start_up_cost(worker: Any) -> RunningCost:
    """The cost model to begin with.

    Args:
        worker: an ``AspireWorker`` whose pools, attention backend and CUDA graphs are ready.
    """
    config = worker.config
    if not config.cost_profile:
        return RunningCost()
    key = cost_key(worker)
    path = Path(config.cost_file).expanduser() if config.cost_file else None
    if path is None and str(worker.model_runner.device).startswith("cuda"):
        path = _cached(key)
    if path is not None:
        # One rank looks: a file that appears between two looks would part the ranks.
        kept = worker.ranks.from_first(lambda: _kept(path, key))
        if kept is not None:
            return RunningCost.stored(kept, str(path))
    cost = RunningCost.profiled(lambda: profile_steps(worker))
    if cost.fitted is not None and path is not None and worker.ranks.rank == 0:
        try:
            save_cost_model(path, key, cost.fitted)
        except OSError as fault:
            logger.warning("ASPIRE: the step costs cannot be kept in %s: %s", path, fault)
    return cost


def log_forecast(worker: Any) -> None:
    """Say what drafting is worth on this machine, where its step costs are known.

    Args:
        worker: as for :func:`start_up_cost`, which has run.
    """
    if worker.cost.fitted is None:
        return
    runner = worker.model_runner
    found = forecasts(
        worker.cost.fitted,
        runner.attn_backend.context.draft_kv_many,
        worker.gamma_max,
        runner.server_args.max_running_requests,
        worker.context_len,
        runner.max_total_num_tokens,
    )
    logger.info("ASPIRE: %s", describe_forecasts(found))


def _kept(path: Path, key: CostKey) -> CostModel | None:
    """The fit of an earlier start with this key, None where there is none."""
    try:
        return load_cost_model(path, key)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as fault:
        logger.warning("ASPIRE: %s; measuring again", fault)
        return None


def cost_key(worker: Any) -> CostKey:
    """Everything that the step times of this server depend on."""
    from sglang import __version__ as sglang_version

    runner, args = worker.model_runner, worker.model_runner.server_args
    graphs = getattr(runner, "decode_cuda_graph_runner", None)
    tiers = getattr(graphs, "capture_num_tokens", None) or ()
    return CostKey(
        device=_device(runner.device),
        model=str(args.model_path),
        tp_size=args.tp_size,
        dtype=str(runner.dtype),
        page_size=runner.page_size,
        budget=runner.attn_backend.context.describe(),
        buckets=(),
        attention_implementation=type(runner.attn_backend).__name__,
        sglang_version=sglang_version,
        extra={
            "aspire_version": __version__,
            "gamma_max": str(worker.gamma_max),
            "threads": str(torch.get_num_threads()),
            "tiers": ",".join(map(str, tiers)),
        },
    )


def _device(device: Any) -> str:
    if str(device).startswith("cuda"):
        return torch.cuda.get_device_name()
    return f"{platform.node()} {platform.machine()} x{os.cpu_count()}"


def _cached(key: CostKey) -> Path:
    root = Path(os.environ.get("ASPIRE_CACHE") or "~/.cache/aspire-sglang").expanduser()
    digest = hashlib.sha256(json.dumps(key.fields(), sort_keys=True).encode()).hexdigest()
    return root / "costs" / f"{digest[:16]}.json"
