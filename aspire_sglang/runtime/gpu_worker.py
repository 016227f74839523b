"""The speculative worker on a GPU: the host decides modes, the device keeps lengths and tokens.

A step is launched without waiting for the device. What it accepted becomes known when SGLang
processes its result: at once, or with overlap scheduling while the next step runs. Until then the
host knows the number of pending drafts exactly, as every verify leaves none, and the number of
committed tokens up to one verify.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)

from aspire_sglang.attention.step_buffers import HostStep, StepView, pack_step
from aspire_sglang.config import AspireConfig, ConfigError
from aspire_sglang.kernels.step_layout import lay_out_step
from aspire_sglang.runtime.batching import step_shape
from aspire_sglang.runtime.device_sampler import DeviceSampler, RequestSampling, choose_tokens
from aspire_sglang.runtime.device_state import DeviceState
from aspire_sglang.runtime.draft_state import SlotState
from aspire_sglang.runtime.gpu_graphs import PlainGraphs, TierLayout, tier_of
from aspire_sglang.runtime.modes import Running
from aspire_sglang.runtime.results import FEEDBACK, VERIFIED_ROWS
from aspire_sglang.runtime.spec_inputs import NextStepInput, StagedForwardInput
from aspire_sglang.runtime.switch import draft_limit
from aspire_sglang.runtime.worker import AspireWorker
from aspire_sglang.speculation.cost_model import StepShape

logger = logging.getLogger(__name__)

# Steps take a few milliseconds and learning from one a fifth of one.
OBSERVED_SHARE = 0.1

# Mixed steps after something else ran whose times say little: the host is busy with what ran.
UNSETTLED_STEPS = 3


@dataclass(frozen=True)
class Staged:
    """A step whose rows and tokens are on the device.

    ``layout``: the graph tier it was padded to, None for an eager step.
    """

    host: HostStep
    view: StepView
    layout: TierLayout | None


@dataclass(frozen=True)
class Feedback:
    """What to learn from a step once its accept lengths are known.

    ``verified``: per verify row its state, request and drafts. ``started`` and ``ended``: events
    around the step on the device. ``typical``: mixed steps went before.
    """

    worker: GpuWorker
    shape: StepShape
    num_drafts: int
    verified: list[tuple[SlotState, Any, int]]
    started: Any
    ended: Any
    graph: bool
    typical: bool

    def __call__(self, accept_lens: list[int]) -> None:
        """Feed estimators, cost model and counters; the step has ended."""
        worker = self.worker
        for (state, req, drafts), length in zip(self.verified, accept_lens, strict=True):
            state.settle(drafts, length - 1)
            # With overlap a request may have ended in the step before, unknown at launch.
            if not req.finished():
                worker.telemetry.verified(req.rid, drafts, length - 1)
        seconds = self.started.elapsed_time(self.ended) / 1e3
        if self.typical:
            agree = worker.ranks.first_number
            worker.cost.observe(self.shape, seconds, share=OBSERVED_SHARE, agree=agree)
        worker.telemetry.step(
            drafts=self.num_drafts,
            verifies=len(self.verified),
            tokens=self.shape.tokens,
            seconds=seconds,
            graph=self.graph,
        )


class GpuWorker(AspireWorker):
    """See the module and :class:`AspireWorker`."""

    plain_phases = True

    def __init__(self, *, server_args: Any, target_worker: Any, **kwargs: Any) -> None:
        super().__init__(server_args=server_args, target_worker=target_worker, **kwargs)
        # Choosing the next tokens belongs to the captured forward: it saves its launches.
        target_worker.model_runner.capture_tail_hooks.append(self._choose_in_graph)
        self._plain_graphs: PlainGraphs | None = None
        # What was asked for this step before its batch was prepared.
        self._asked: tuple[list[Any], Running] | None = None
        # Mixed steps since something else ran.
        self._in_row = 0
        self._seed: int | None = server_args.random_seed

    def init_cuda_graphs(self) -> None:
        if self.model_runner.decode_cuda_graph_runner is not None:
            self._plain_graphs = PlainGraphs(self.model_runner)
        super().init_cuda_graphs()
        # What is there now stays: no collection of garbage need look at it again, which would take
        # longer than several steps.
        gc.collect()
        gc.freeze()

    def alloc_memory_pool(self, req_to_token_pool: Any = None, **kwargs: Any) -> None:
        super().alloc_memory_pool(req_to_token_pool=req_to_token_pool, **kwargs)
        table = req_to_token_pool.req_to_token
        self.device_state = DeviceState(table.shape[0], self.speculative_num_steps, table.device)
        self.sampling = RequestSampling(table.shape[0], self._seed)

    def _apply_config(self, config: AspireConfig) -> None:
        scheduler = config.scheduler
        if scheduler.sampled_confidence or scheduler.predictor != "bins":
            raise ConfigError(
                "scheduler.sampled_confidence and the predictor 'regression' run on a CPU only: "
                "on a GPU nothing is known on the host of a draft's probability"
            )
        super()._apply_config(config)

    def _make_sampler(self) -> DeviceSampler:
        return DeviceSampler(self.device_state, self.model_runner.attn_backend.steps, self.ranks)

    def _choose_in_graph(self, _: Any, output: Any, forward_batch: Any, tokens: int) -> None:
        steps = self.model_runner.attn_backend.steps
        view = steps.view(forward_batch.batch_size, tokens)
        choose_tokens(steps, view, output.next_token_logits)

    def share_tokens(self, relay: Any) -> None:
        super().share_tokens(relay)
        # One memory, so that plain and mixed steps find each other's tokens.
        relay.share_tokens(self.device_state.bonus)

    def resumed_input(self, batch: Any, relay: Any) -> None:
        return None

    def plain_steps(self, batch: Any) -> tuple[int, Running]:
        running = self.running(batch)
        self._asked = (batch.reqs, running)
        graphs = self._plain_graphs
        if graphs is None or graphs.places(len(batch.reqs)) is None:
            return 0, running
        return self.modes.plain_steps(*running), running

    def _plain_forward(self, batch: Any) -> GenerationBatchResult:
        assert self._plain_graphs is not None
        self._in_row = 0
        with self._plain_graphs.in_use():
            return super()._plain_forward(batch)

    def _prefill(self, batch: Any) -> GenerationBatchResult:
        self._in_row = 0
        result = super()._prefill(batch)
        self.device_state.bonus[batch.req_pool_indices] = result.next_token_ids.long()
        for req in batch.reqs:
            self.sampling.set(req.req_pool_idx, req.sampling_params)
        return result

    def running(self, batch: Any) -> Running:
        reqs = batch.reqs
        slots = [req.req_pool_idx for req in reqs]
        # One look at the pool for all rows: a tensor element at a time costs microseconds each.
        generations = self.req_to_token_pool.req_generation.numpy()[slots].tolist()
        states = list(map(self.state.get, slots, generations))
        seq_lens, caps = [], []
        gamma_max, last = self.gamma_max, self.context_len - 1
        for req, state in zip(reqs, states, strict=True):
            unsettled = state.unsettled
            seq_len = req.kv_committed_len + unsettled
            seq_lens.append(seq_len)
            # As _max_draft, whose parts that never change are looked up once.
            if state.most is None:
                params = req.sampling_params
                own = draft_limit(params.custom_params)
                most = self.speculative_num_steps if own is None else own
                state.most = most, params.max_new_tokens - 1
            most, tokens = state.most
            cap = min(gamma_max, most, tokens - len(req.output_ids) - unsettled, last - seq_len)
            caps.append(cap if cap > 0 and req.to_finish is None else 0)
        return Running(slots, seq_lens, states, caps)

    def _decode(self, batch: Any) -> GenerationBatchResult:
        asked, self._asked = self._asked, None
        known = asked is not None and asked[0] is batch.reqs
        running = asked[1] if asked is not None and known else self.running(batch)
        slots, seq_lens, states, _ = running
        verify, draft_kv = self.modes.decide(*running)
        pending = [state.pending for state in states]
        sampling = self.sampling
        step = HostStep.build(
            slots, pending, verify, sampling.temperature[slots], sampling.keys[slots]
        )
        staged = self.stage(step, batch.seq_lens)
        if self.rank_check is not None:
            lists = self.model_runner.attn_backend.context.lists
            costs = tuple(self.cost.model.coefficients)
            self.rank_check.compare_staged(step, staged.view, lists, costs)
        shape = step_shape(seq_lens, pending, verify, draft_kv)
        # Not before: what the host does until here is not the device's time.
        started = torch.cuda.Event(enable_timing=True)
        started.record()
        forward = self._forward_staged(batch, staged)
        logits = forward.logits_output.next_token_logits[: staged.host.num_tokens]
        outcome = self.sampler.step(
            staged.host,
            staged.view,
            logits,
            batch.sampling_info,
            [req.sampling_params for req in batch.reqs],
            filtered=bool(sampling.filtered[slots].any()),
            chosen=forward.can_run_cuda_graph,
        )
        return self._result(batch, staged, states, shape, forward, outcome, started)

    def stage(self, step: HostStep, seq_lens: torch.Tensor) -> Staged:
        """Put a step on the device, padded to a graph's tier if there is one.

        Args:
            step: what the host decided.
            seq_lens: ``[bs]`` int64 on the device, tokens with final KV.
        """
        count = len(step.order)
        tier = tier_of(self.model_runner.decode_cuda_graph_runner, count, step.num_tokens)
        rows, tokens = tier or (count, step.num_tokens)
        view = self._lay_out(step, rows, tokens, seq_lens)
        return Staged(step, view, TierLayout(count, tokens) if tier else None)

    def _lay_out(self, step: HostStep, rows: int, tokens: int, seq_lens: torch.Tensor) -> StepView:
        backend, state = self.model_runner.attn_backend, self.device_state
        packed = pack_step(step, rows, tokens, drafts_vote=backend.drafts_vote)
        view = backend.steps.load(packed, rows, tokens)
        lay_out_step(
            view.slots,
            view.order,
            view.pending,
            view.token_row,
            view.token_step,
            seq_lens,
            state.bonus,
            state.drafts,
            state.pending,
            self.req_to_token_pool.req_to_token,
            view.input_ids,
            view.positions,
            view.out_cache_loc,
            view.row_lens,
            view.context_lens,
        )
        return view

    def _forward_staged(self, batch: Any, staged: Staged) -> GenerationBatchResult:
        # SGLang snapshots the batch around this call, so it may be rebound freely.
        batch.forward_mode = ForwardMode.TARGET_VERIFY
        batch.input_ids = staged.view.input_ids
        batch.out_cache_loc = staged.view.out_cache_loc
        batch.spec_info = StagedForwardInput(staged.view.positions, staged.layout)
        forward_batch = ForwardBatch.init_new(
            batch,
            self.model_runner,
            capture_hidden_mode=CaptureHiddenMode.NULL,
            return_hidden_states_before_norm=False,
        )
        return self.target_worker.forward_batch_generation(
            None, forward_batch=forward_batch, is_verify=True
        )

    def _result(
        self,
        batch: Any,
        staged: Staged,
        states: list[SlotState],
        shape: StepShape,
        forward: GenerationBatchResult,
        outcome: Any,
        started: Any,
    ) -> GenerationBatchResult:
        host, view = staged.host, staged.view
        rows = host.verify_rows
        count = len(host.order)
        new_seq_lens = None
        if batch.enable_overlap:
            # The relay is by slot, so the rows need not be put in batch order.
            self.relay.publish(view.slots[:count].long(), view.row_lens[:count])
        else:
            new_seq_lens = batch.seq_lens.clone()
            new_seq_lens[view.order[:count].long()] = view.row_lens[:count]
        result = GenerationBatchResult(
            logits_output=forward.logits_output,
            next_token_ids=outcome.tokens.flatten(),
            accept_lens=outcome.accept_lens,
            cap_lens=torch.from_numpy(host.pending[host.order[host.num_drafts :]]),
            new_seq_lens=new_seq_lens,
            # The tokens stay in the state, which the scheduler's relay shares.
            next_draft_input=NextStepInput(),
            speculative_num_draft_tokens=self.speculative_num_draft_tokens,
            can_run_cuda_graph=forward.can_run_cuda_graph,
        )
        ended = torch.cuda.Event(enable_timing=True)
        ended.record()
        self._in_row += 1
        verified = []
        for row in rows:
            state = states[row]
            verified.append((state, batch.reqs[row], state.pending))
            state.begin_settling()
        for row in host.draft_rows:
            states[row].pending += 1
            states[row].age += 1
        feedback = Feedback(
            self,
            shape,
            host.num_drafts,
            verified,
            started,
            ended,
            forward.can_run_cuda_graph,
            self._in_row > UNSETTLED_STEPS,
        )
        setattr(result, VERIFIED_ROWS, rows)
        setattr(result, FEEDBACK, feedback)
        return result

    # -- start-up profile --

    profile_lengths = (1024, 7168, 30_000)
    profile_rows = (1, 16, 64, 256)
    profile_repeats = 3

    def profile_step(
        self, slots: list[int], seq_len: int, pending: int, verify: bool
    ) -> tuple[StepShape, Callable[[], float]]:
        rows = len(slots)
        device = self.req_to_token_pool.req_to_token.device
        seq_lens = torch.full((rows,), seq_len, dtype=torch.int64, device=device)
        draft_kv = self.model_runner.attn_backend.context.draft_kv(seq_len + pending)
        pendings, modes = [pending] * rows, [verify] * rows
        shape = step_shape([seq_len] * rows, pendings, modes, [draft_kv] * rows)

        def seconds() -> float:
            torch.cuda.synchronize()
            start = time.perf_counter()
            staged = self.stage(HostStep.build(slots, pendings, modes), seq_lens)
            batch = ForwardBatch(
                forward_mode=ForwardMode.TARGET_VERIFY,
                batch_size=rows,
                input_ids=staged.view.input_ids,
                req_pool_indices=torch.tensor(slots, device=device),
                seq_lens=seq_lens,
                seq_lens_sum=rows * seq_len,
                out_cache_loc=staged.view.out_cache_loc,
                positions=staged.view.positions,
                spec_algorithm=self.model_runner.spec_algorithm,
                spec_info=StagedForwardInput(staged.view.positions, staged.layout),
                capture_hidden_mode=CaptureHiddenMode.NULL,
                num_token_non_padded_cpu=staged.view.input_ids.shape[0],
            )
            self.target_worker.forward_batch_generation(None, forward_batch=batch, is_verify=True)
            torch.cuda.synchronize()
            return time.perf_counter() - start

        return shape, seconds
