"""The speculative worker on a GPU: the host decides modes, the device keeps lengths and tokens.

A step is launched without waiting for the device. What it accepted becomes known when SGLang
processes its result: at once, or with overlap scheduling while the next step runs. Until then the
host knows the number of pending drafts exactly, as every verify leaves none, and the number of
committed tokens up to one verify. So it can launch several steps, a burst, before SGLang sees a
result.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)

from aspire_sglang.attention.step_buffers import HostStep, StepView, pack_step
from aspire_sglang.config import AspireConfig, ConfigError
from aspire_sglang.kernels.step_layout import lay_out_step
from aspire_sglang.runtime.device_sampler import DeviceSampler, RequestSampling, choose_tokens
from aspire_sglang.runtime.device_state import DeviceState
from aspire_sglang.runtime.draft_state import SlotState
from aspire_sglang.runtime.gpu_burst import Burst, BurstClock, lengths_after, next_of_burst
from aspire_sglang.runtime.gpu_graphs import MixedGraphs, PlainGraphs, TierLayout, tier_of
from aspire_sglang.runtime.gpu_profile import device_step
from aspire_sglang.runtime.gpu_step import Feedback, Joined, Launched, Staged, shape_of
from aspire_sglang.runtime.modes import Running
from aspire_sglang.runtime.reserve import warm_up
from aspire_sglang.runtime.results import VERIFIED
from aspire_sglang.runtime.spec_inputs import NextStepInput, StagedForwardInput
from aspire_sglang.runtime.switch import draft_limit
from aspire_sglang.runtime.worker import AspireWorker
from aspire_sglang.speculation.cost_model import StepShape

logger = logging.getLogger(__name__)

# Mixed steps after something else ran whose times say little: the host is busy with what ran.
UNSETTLED_STEPS = 3


class GpuWorker(AspireWorker):
    """See the module and :class:`AspireWorker`.

    Attributes:
        mixed_graphs: graphs of mixed steps that are replayed at once, None where SGLang replays.
        clock: told of bursts and their results.
    """

    plain_for_parameters = True

    def __init__(self, *, server_args: Any, target_worker: Any, **kwargs: Any) -> None:
        super().__init__(server_args=server_args, target_worker=target_worker, **kwargs)
        # Choosing the next tokens belongs to the captured forward: it saves its launches.
        target_worker.model_runner.capture_tail_hooks.append(self._choose_in_graph)
        self._plain_graphs: PlainGraphs | None = None
        self.mixed_graphs: MixedGraphs | None = None
        # What was asked for this step before its batch was prepared.
        self._asked: tuple[list[Any], Running] | None = None
        # Mixed steps since something else ran.
        self._in_row = 0
        self.clock = BurstClock(self)
        self._seed: int | None = server_args.random_seed

    def init_cuda_graphs(self) -> None:
        if self.model_runner.decode_cuda_graph_runner is not None:
            self._plain_graphs = PlainGraphs(self.model_runner)
            self.mixed_graphs = MixedGraphs.of(self.model_runner)
            if self.mixed_graphs is None:
                logger.info("ASPIRE: mixed steps are replayed by SGLang's own code")
        super().init_cuda_graphs()
        self._warm_up()
        # What is there now stays: no collection of garbage need look at it again, which would take
        # longer than several steps.
        gc.collect()
        gc.freeze()

    def _warm_up(self) -> None:
        """Compile what the first requests would wait for."""
        table = self.req_to_token_pool.req_to_token
        if table.is_cuda:
            warm_up(table, self.req_to_token_pool.size)
        # Row 0 of the table is SGLang's padding.
        step = HostStep.build([0], [0], [True])
        staged = self.stage(step, torch.zeros(1, dtype=torch.int64, device=table.device))
        logits = torch.empty(0, device=table.device)
        self.sampler.step(step, staged.view, logits, None, [], filtered=False, chosen=True)

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

    def _chosen_plain_steps(self, batch: Any, running: Running) -> int:
        self._asked = (batch.reqs, running)
        if not self.may_decode_plainly(len(batch.reqs)):
            return 0
        return self.modes.plain_steps(*running)

    def may_decode_plainly(self, rows: int) -> bool:
        """Whether a batch of so many requests has a graph of plain steps."""
        return self._plain_graphs is not None and self._plain_graphs.places(rows) is not None

    def _plain_forward(self, batch: Any) -> GenerationBatchResult:
        self._in_row = 0
        self.clock.interrupt(plain=True)
        graphs = self._plain_graphs
        # Without graphs, or a batch that they do not hold, steps that requests ask for run eagerly.
        with graphs.in_use() if graphs else nullcontext():
            return super()._plain_forward(batch)

    def _prefill(self, batch: Any) -> GenerationBatchResult:
        self._in_row = 0
        self.clock.interrupt(plain=False)
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
        for req, state in zip(reqs, states, strict=True):
            seq_len = req.kv_committed_len + state.unsettled
            seq_lens.append(seq_len)
            caps.append(self.cap(req, state, seq_len))
        return Running(slots, seq_lens, states, caps)

    def cap(self, req: Any, state: SlotState, seq_len: int) -> int:
        # As _max_draft, whose parts that never change are looked up once.
        if state.most is None:
            params = req.sampling_params
            own = draft_limit(params.custom_params)
            most = self.speculative_num_steps if own is None else own
            state.most = most, params.max_new_tokens - 1
        most, tokens = state.most
        left = tokens - len(req.output_ids) - state.unsettled
        cap = min(self.gamma_max, most, left, self.context_len - 1 - seq_len)
        return cap if cap > 0 and req.to_finish is None else 0

    def may_have_ended(self, req: Any, state: SlotState) -> bool:
        """Whether verifies without a result yet may have given the request its last token."""
        assert state.most is not None
        return bool(req.to_finish) or len(req.output_ids) + state.unsettled > state.most[1]

    def _decode(self, batch: Any) -> GenerationBatchResult:
        asked, self._asked = self._asked, None
        known = asked is not None and asked[0] is batch.reqs
        running = asked[1] if asked is not None and known else self.running(batch)
        verify, draft_kv = self.modes.decide(*running)
        step, seq_lens = self.host_step(running, verify), batch.seq_lens
        burst, ended = self.clock.begin(running), set[int]()
        launched = [self._launch(batch, running, step, draft_kv, seq_lens, burst)]
        while (more := next_of_burst(self, running, burst, launched[-1], ended)) is not None:
            seq_lens = lengths_after(launched[-1], seq_lens)
            running = more[0]
            launched.append(self._launch(batch, *more, seq_lens, burst))
        if len(launched) == 1:
            return self._result(batch, launched, None)
        return self._result(batch, launched, lengths_after(launched[-1], seq_lens))

    def host_step(
        self, running: Running, verify: list[bool], left_out: Sequence[int] = ()
    ) -> HostStep:
        slots, sampling = running.slots, self.sampling
        pending = [state.pending for state in running.states]
        heat, keys = sampling.temperature[slots], sampling.keys[slots]
        return HostStep.build(slots, pending, verify, heat, keys, left_out)

    def _launch(
        self,
        batch: Any,
        running: Running,
        step: HostStep,
        draft_kv: Sequence[int],
        seq_lens: torch.Tensor,
        burst: Burst,
    ) -> Launched:
        """Launch one step and move the states of its rows on.

        Args:
            step: what was decided for ``running``.
            draft_kv: per request, tokens that a draft row reads.
            seq_lens: ``[bs]`` int64 on the device, tokens with final KV.
            burst: what it belongs to.
        """
        staged = self.stage(step, seq_lens)
        context = self.model_runner.attn_backend.context
        if self.rank_check is not None and context.layer_lists is None:
            costs = tuple(self.cost.model.coefficients)
            self.rank_check.compare_staged(step, staged.view, context.lists, costs)
        shape = shape_of(running, step, draft_kv)
        # Not before: what the host does until here is not the device's time.
        started = torch.cuda.Event(enable_timing=True)
        started.record()
        forward = self._forward_staged(batch, staged)
        logits = forward.logits_output.next_token_logits[: step.num_tokens]
        outcome = self.sampler.step(
            step,
            staged.view,
            logits,
            batch.sampling_info,
            [req.sampling_params for req in batch.reqs],
            filtered=bool(self.sampling.filtered[running.slots].any()),
            chosen=forward.can_run_cuda_graph,
        )
        ended = torch.cuda.Event(enable_timing=True)
        ended.record()
        self._in_row += 1
        verified = []
        for row in step.verify_rows:
            state = running.states[row]
            verified.append((state, batch.reqs[row], state.pending))
            state.begin_settling()
        for row in step.draft_rows:
            running.states[row].pending += 1
            running.states[row].age += 1
        self.clock.launched(burst, self.cost.model.predict(shape))
        feedback = Feedback(
            self,
            burst,
            shape,
            step.num_drafts,
            verified,
            started,
            ended,
            forward.can_run_cuda_graph,
            self._in_row > UNSETTLED_STEPS,
        )
        return Launched(staged, outcome, forward.logits_output, feedback)

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
        if self.mixed_graphs is not None and staged.layout is not None:
            logits = self.mixed_graphs.replay(staged.layout.graph_num_tokens)
            output = LogitsProcessorOutput(next_token_logits=logits)
            return GenerationBatchResult(logits_output=output, can_run_cuda_graph=True)
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
        self, batch: Any, steps: list[Launched], seq_lens: torch.Tensor | None
    ) -> GenerationBatchResult:
        """``seq_lens``: see :func:`lengths_after`; None after one step that nobody sat out."""
        joined = Joined.of(steps)
        if batch.enable_overlap:
            if seq_lens is None:
                # The relay is by slot, so the rows need not be put in batch order.
                view, count = steps[0].staged.view, len(batch.reqs)
                self.relay.publish(view.slots[:count].long(), view.row_lens[:count])
            else:
                self.relay.publish(batch.req_pool_indices, seq_lens)
        elif seq_lens is None:
            seq_lens = lengths_after(steps[0], batch.seq_lens)
        result = GenerationBatchResult(
            logits_output=steps[-1].logits_output,
            next_token_ids=joined.tokens.flatten(),
            accept_lens=joined.accept_lens,
            cap_lens=joined.drafts,
            new_seq_lens=None if batch.enable_overlap else seq_lens,
            # The tokens stay in the state, which the scheduler's relay shares.
            next_draft_input=NextStepInput(),
            speculative_num_draft_tokens=self.speculative_num_draft_tokens,
            can_run_cuda_graph=steps[-1].feedback.graph,
        )
        setattr(result, VERIFIED, joined.parts)
        return result

    # -- start-up profile --

    profile_lengths = (1024, 7168, 30_000)
    profile_rows = (1, 16, 64, 256)
    profile_repeats = 3

    def profile_step(
        self, slots: list[int], seq_len: int, pending: int, verify: bool
    ) -> tuple[StepShape, Callable[[], float]]:
        return device_step(self, slots, seq_len, pending, verify)
