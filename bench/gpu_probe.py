"""A plugin for measurements only: looks into the KV pool of an engine, and can do harm on purpose.

SGLang finds it through an entry point that :func:`install` writes into a folder for the path of one
engine; nothing of it is installed. What it does is chosen by environment variables:

* always: the scheduler answers the remote calls ``probe_kv``, ``probe_host``, ``probe_timeline``,
  ``probe_prefill``, ``probe_costs`` and ``probe_fill``;
* ``PROBE_SPLITS=1``: FlashAttention reads every context in one piece, in stock SGLang and ASPIRE;
* ``PROBE_BREAK=1``: verify rows leave the KV that draft rows wrote, the fault that a check of the
  KV has to find;
* ``PROBE_REPLAY=0.9``: drafts are accepted at that rate whatever the model says, for random
  weights, whose own acceptance says nothing; ``probe_replay`` changes the rate;
* ``PROBE_TENSOR_PARALLEL=1``: several ranks are not refused, so that they can be tried;
* ``PROBE_ONE_GPU=1``: the ranks of an engine share the first GPU, see ``bench/gpu_shared.py``;
* ``PROBE_PHASES=1``: phases of plain steps begin at random and have random lengths;
* ``PROBE_READS_ALL=1``: at the refresh layer draft rows attend to everything;
* ``PROBE_BURST_STEPS``: most steps that are launched for one round of the scheduler.
"""

from __future__ import annotations

import cProfile
import inspect
import json
import os
import random
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.gpu_shared import share_one_gpu


def install(folder: Path) -> None:
    """Make this plugin discoverable for processes that have ``folder`` on their path."""
    target = folder / "aspire_gpu_probe-0.dist-info"
    target.mkdir(parents=True, exist_ok=True)
    (target / "METADATA").write_text("Metadata-Version: 2.1\nName: aspire-gpu-probe\nVersion: 0\n")
    (target / "entry_points.txt").write_text(
        "[sglang.srt.plugins]\nzz_aspire_gpu_probe = bench.gpu_probe:load\n"
    )


def load() -> None:
    """Called by SGLang in every process that loads plugins."""
    from sglang.srt.managers.scheduler import Scheduler

    Scheduler.probe_kv = probe_kv
    Scheduler.probe_host = probe_host
    Scheduler.probe_fill = probe_fill
    Scheduler.probe_replay = probe_replay
    Scheduler.probe_timeline = probe_timeline
    Scheduler.probe_bursts = probe_bursts
    Scheduler.probe_costs = probe_costs
    Scheduler.probe_prefill = probe_prefill
    if os.environ.get("PROBE_SPLITS"):
        _read_in_one_piece()
    if os.environ.get("PROBE_TENSOR_PARALLEL"):
        _allow_ranks()
    if os.environ.get("PROBE_ONE_GPU"):
        share_one_gpu()
    if os.environ.get("PROBE_BREAK"):
        _keep_draft_kv()
    if os.environ.get("PROBE_REPLAY"):
        _replay(float(os.environ["PROBE_REPLAY"]))
    if os.environ.get("PROBE_PHASES"):
        _random_phases()
    if os.environ.get("PROBE_READS_ALL"):
        from aspire_sglang.attention import gpu_mixed

        gpu_mixed.REFRESH_READS_ALL = True
    if os.environ.get("PROBE_BURST_STEPS"):
        probe_bursts(None, int(os.environ["PROBE_BURST_STEPS"]))


def probe_kv(scheduler: Any, texts: list[list[int]], starts: list[int], path: str) -> None:
    """Save keys and values of the cached texts, from position ``starts[i]`` on, to ``path``.

    A list of ``[2, layers, tokens, heads, dim]`` tensors, with the heads of the first rank; other
    ranks save theirs to ``path`` with their number behind it. The last token of a text has no KV,
    and only whole pages are cached.
    """
    import torch
    from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
    from sglang.srt.mem_cache.radix_cache import RadixKey

    pool = scheduler.token_to_kv_pool_allocator.get_kvcache()
    found = []
    for ids, start in zip(texts, starts, strict=True):
        key = RadixKey(array("q", ids))
        slots = scheduler.tree_cache.match_prefix(MatchPrefixParams(key=key)).device_indices
        if len(slots) < len(ids) - scheduler.page_size:
            raise ValueError(f"{len(slots)} of {len(ids)} tokens are cached")
        slots = slots[start : len(ids) - 1].long()
        layers = range(pool.layer_num)
        keys = torch.stack([pool.get_key_buffer(layer)[slots] for layer in layers])
        values = torch.stack([pool.get_value_buffer(layer)[slots] for layer in layers])
        found.append(torch.stack([keys, values]).cpu())
    torch.save(found, f"{path}.{scheduler.ps.tp_rank}" if scheduler.ps.tp_rank else path)


def probe_host(scheduler: Any, path: str | None) -> None:
    """Start Python's profiler in the scheduler; with a path, stop it and save what it found."""
    if path is None:
        scheduler.probe_profile = cProfile.Profile()
        scheduler.probe_profile.enable()
        return
    scheduler.probe_profile.disable()
    scheduler.probe_profile.dump_stats(path)


def probe_fill(scheduler: Any, texts: list[list[int]]) -> None:
    """Pretend that the texts were prefilled: random KV, and entries in the prefix cache.

    For timing with random weights, whose own KV would say no more and takes long to compute.
    """
    import torch
    from sglang.srt.mem_cache.base_prefix_cache import InsertParams
    from sglang.srt.mem_cache.radix_cache import RadixKey

    allocator = scheduler.token_to_kv_pool_allocator
    pool = allocator.get_kvcache()
    for layer in range(pool.layer_num):
        pool.get_key_buffer(layer).normal_()
        pool.get_value_buffer(layer).normal_()
    for ids in texts:
        slots = allocator.alloc(len(ids))
        scheduler.tree_cache.insert(InsertParams(key=RadixKey(array("q", ids)), value=slots))
    torch.cuda.synchronize()


def probe_replay(scheduler: Any, rate: float) -> None:
    """Accept drafts at this rate from now on."""
    _RATE[0] = rate


def probe_costs(scheduler: Any) -> None:
    """Measure step costs as at the start. Nothing may run, and the prefix cache must be empty."""
    from aspire_sglang.runtime.cost import RunningCost
    from aspire_sglang.runtime.profile import profile_steps

    worker = scheduler.draft_worker
    worker.cost = RunningCost.profiled(lambda: profile_steps(worker))
    worker.telemetry.cost = worker.cost.report
    worker._apply_config(worker.config)


def probe_bursts(_: Any, steps: int | None = None, seconds: float | None = None) -> None:
    """Launch at most so many steps for one round, until the device has work for so many seconds;
    None: as by default."""
    from aspire_sglang.runtime import gpu_burst

    _BURSTS.append((gpu_burst.BURST_STEPS, gpu_burst.BURST_SECONDS))
    usual_steps, usual_seconds = _BURSTS[0]
    gpu_burst.BURST_STEPS = usual_steps if steps is None else steps
    gpu_burst.BURST_SECONDS = usual_seconds if seconds is None else seconds


_BURSTS: list[tuple[int, float]] = []


def probe_prefill(scheduler: Any, path: str | None, graphs: bool = True) -> None:
    """Record ASPIRE's prefills from now on, run with or without CUDA graphs; with a path, stop and
    save what came.

    A list of ``[from a graph, tokens, {tokens of a context: its page list}]``.
    """
    worker = scheduler.draft_worker
    runner = worker.model_runner
    if path is not None:
        Path(path).write_text(json.dumps(scheduler.probe_prefills))
        del worker._prefill
        runner.prefill_cuda_graph_runner = scheduler.probe_runner
        return
    scheduler.probe_prefills = found = []
    scheduler.probe_runner = runner.prefill_cuda_graph_runner
    if not graphs:
        runner.prefill_cuda_graph_runner = runner.eager_runner
    original = worker._prefill

    def recorded(batch: Any) -> Any:
        tokens = batch.extend_num_tokens
        result = original(batch)
        lists, listed = runner.attn_backend.context.lists, {}
        for req, length in zip(batch.reqs, batch.seq_lens.tolist(), strict=True):
            pages = lists.pages[req.req_pool_idx, : int(lists.counts[req.req_pool_idx])]
            listed[length] = pages.tolist()
        found.append([result.can_run_cuda_graph, tokens, listed])
        return result

    worker._prefill = recorded


def probe_timeline(scheduler: Any, path: str | None) -> None:
    """Record every step of the scheduler from now on; with a path, stop and save what came.

    A list of ``["launch", start, end, mode, rows]``, ``["result", start, end, rows, new tokens]``,
    ``["step", drafts, verifies, tokens, seconds, plain]`` and, for a step of ASPIRE on a GPU,
    ``["device", drafts, verifies, tokens, KV tokens, seconds, predicted, idle before, committed]``,
    with seconds on the device.
    """
    if path is not None:
        if scheduler.ps.tp_rank == 0:
            Path(path).write_text(json.dumps(scheduler.probe_events))
        for name in ("run_batch", "process_batch_result"):
            delattr(scheduler, name)
        if scheduler.probe_step:
            scheduler.draft_worker.telemetry.step = scheduler.probe_step
            _FEEDBACK.clear()
        return
    scheduler.probe_events = events = []

    def timed(name: str, kind: str, describe: Callable[..., list[Any]]) -> None:
        original = getattr(scheduler, name)

        def wrapped(batch: Any, *args: Any) -> Any:
            before, start = _new_tokens(batch), time.perf_counter()
            found = original(batch, *args)
            end = time.perf_counter()
            events.append([kind, start, end, *describe(batch, _new_tokens(batch) - before)])
            return found

        setattr(scheduler, name, wrapped)

    timed("run_batch", "launch", lambda batch, _: [_mode(batch), len(batch.reqs)])
    timed("process_batch_result", "result", lambda batch, new: [len(batch.reqs), new])
    scheduler.probe_step = None
    telemetry = getattr(scheduler.draft_worker, "telemetry", None)
    if telemetry is not None:
        scheduler.probe_step = step = telemetry.step

        def recorded(**given: Any) -> None:
            step(**given)
            kinds = ("drafts", "verifies", "tokens", "seconds", "plain")
            events.append(["step", *[given.get(kind) for kind in kinds]])

        telemetry.step = recorded
        _FEEDBACK.append(events)
        _record_device_times()


_FEEDBACK: list[list[Any]] = []


def _record_device_times() -> None:
    from aspire_sglang.runtime.gpu_step import Feedback

    original = Feedback.__call__
    if hasattr(original, "probe"):
        return
    last: list[Any] = []

    def recorded(feedback: Any, accept_lens: list[int], counted: list[bool]) -> None:
        if _FEEDBACK:
            shape, started, ended = feedback.shape, feedback.started, feedback.ended
            idle = last[-1].elapsed_time(started) / 1e3 if last else 0.0
            predicted = feedback.worker.cost.model.predict(shape)
            seconds = started.elapsed_time(ended) / 1e3
            rows = feedback.num_drafts, len(feedback.verified), shape.tokens, shape.kv_tokens
            tokens = sum(accept_lens)
            _FEEDBACK[-1].append(["device", *rows, seconds, predicted, idle, tokens])
            last[:] = [ended]
        original(feedback, accept_lens, counted)

    recorded.probe = True  # type: ignore[attr-defined]
    setattr(Feedback, "__call__", recorded)  # noqa: B010


def _new_tokens(batch: Any) -> int:
    return sum(len(req.output_ids) for req in batch.reqs)


def _mode(batch: Any) -> str:
    if batch.forward_mode.is_extend():
        return "prefill"
    return "plain" if batch.spec_algorithm.is_none() else "mixed"


def _random_phases() -> None:
    from aspire_sglang.runtime.modes import ModeScheduler

    choice = random.Random(7)

    def plain_steps(self: Any, slots: Any, seq_lens: Any, states: Any, caps: Any) -> int:
        if any(state.pending for state in states):
            return 0
        return choice.choice([0, 0, 1, 1, 2, 3, 7, 40])

    setattr(ModeScheduler, "plain_steps", plain_steps)  # noqa: B010


def _allow_ranks() -> None:
    from aspire_sglang.runtime import flag_checks

    rows = tuple(row for row in flag_checks.FLAGS if "tp_size" not in row.flags)
    setattr(flag_checks, "FLAGS", rows)  # noqa: B010


def _read_in_one_piece() -> None:
    from sgl_kernel import flash_attn

    original = flash_attn.flash_attn_with_kvcache
    signature = inspect.signature(original)

    def whole(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.arguments.update(num_splits=1, scheduler_metadata=None)
        return original(*bound.args, **bound.kwargs)

    flash_attn.flash_attn_with_kvcache = whole


def _keep_draft_kv() -> None:
    from aspire_sglang.kernels import step_layout

    original = step_layout.lay_out_step
    signature = inspect.signature(original)

    def broken(*args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        given = signature.bind(*args, **kwargs).arguments
        row = given["token_row"]
        drafted = given["token_step"] < given["pending"][row.clamp(min=0).long()]
        # Slot 0 is where padding goes.
        given["out_cache_loc"].masked_fill_(drafted & (row >= 0), 0)

    step_layout.lay_out_step = broken


_RATE = [0.9]


def _replay(rate: float) -> None:
    import torch

    _RATE[0] = rate

    from aspire_sglang.runtime.device_sampler import DeviceSampler

    original = DeviceSampler._accept
    # Its own generator, so that tensor-parallel ranks draw alike.
    generators: list[Any] = []

    def replayed(sampler: Any, step: Any, view: Any) -> Any:
        count = step.num_tokens
        tokens, row = view.next_tokens[:count], view.token_row[:count]
        draft = view.input_ids[:count].roll(-1)
        judged = row == row.roll(-1)
        # Not by an assignment, which would copy from the host and wait for the device.
        judged[-1:].zero_()
        if not generators:
            generators.append(torch.Generator(tokens.device).manual_seed(7))
        passed = torch.rand(count, device=tokens.device, generator=generators[0]) < _RATE[0]
        other = (draft + 1) % 1000
        tokens.copy_(torch.where(judged, torch.where(passed, draft, other), tokens))
        return original(sampler, step, view)

    setattr(DeviceSampler, "_accept", replayed)  # noqa: B010
