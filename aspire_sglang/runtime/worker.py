"""The speculative worker: one mixed forward per scheduler step, then accept or extend drafts."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker

from aspire_sglang.config import AspireConfig, ConfigError, describe, load_config
from aspire_sglang.runtime.agreement import agree_on_outcome
from aspire_sglang.runtime.batching import StepPlan, build_plan
from aspire_sglang.runtime.cost_start import log_forecast, start_up_cost
from aspire_sglang.runtime.draft_state import DraftState, SlotState
from aspire_sglang.runtime.grammars import run_is_complete
from aspire_sglang.runtime.hidden_states import report_hidden_states
from aspire_sglang.runtime.hooks import verify_hooks
from aspire_sglang.runtime.logit_rules import apply_logit_rules, restore_penalties
from aspire_sglang.runtime.logprobs import report_logprobs
from aspire_sglang.runtime.modes import ModeScheduler, Running
from aspire_sglang.runtime.plain_steps import PlainSteps
from aspire_sglang.runtime.plain_worker import PlainPhases
from aspire_sglang.runtime.profile import host_step
from aspire_sglang.runtime.rank_check import RankCheck, check_wanted
from aspire_sglang.runtime.ranks import Ranks
from aspire_sglang.runtime.results import VERIFIED, Verified
from aspire_sglang.runtime.sampler import Accepted, StepSampler
from aspire_sglang.runtime.seeds import seeds_of
from aspire_sglang.runtime.spec_inputs import MixedForwardInput, NextStepInput
from aspire_sglang.runtime.switch import draft_limit
from aspire_sglang.runtime.telemetry import Telemetry
from aspire_sglang.speculation.acceptance import AcceptanceEstimator, make_estimator
from aspire_sglang.speculation.confidence import ConfidenceCalibration
from aspire_sglang.speculation.cost_model import StepShape
from aspire_sglang.speculation.predictor import AcceptancePredictor

logger = logging.getLogger(__name__)


def check_for_ranks(config: AspireConfig, ranks: Ranks) -> None:
    """Refuse what several ranks are not made to agree on.

    Raises:
        ConfigError: naming the option.
    """
    shared = ("refresh", "last_verify", "window")
    if not ranks.alone and config.context.selection not in shared:
        raise ConfigError(
            f"context.selection {config.context.selection} runs without tensor parallelism only: "
            f"with --tp-size use {', '.join(shared)}"
        )
    if not ranks.alone and config.scheduler.predictor == "regression":
        raise ConfigError(
            "scheduler.predictor regression runs without tensor parallelism only: with --tp-size "
            "use bins"
        )


class AspireWorker(PlainPhases, BaseSpecWorker):
    """Drives the target model as its own draft model.

    SGLang calls :meth:`forward_batch_generation` once per scheduler step. A prefill runs as in
    plain decoding. In a decode step every request of the batch takes part in one forward, either
    as a draft row or as a verify row. Steps in which nobody drafts are run as SGLang decodes
    without speculation.
    """

    def __init__(self, *, server_args: Any, target_worker: Any, **_: Any) -> None:
        super().__init__()
        verify_hooks()
        self._target_worker = target_worker
        # The flag, which carries the file's gamma_max unless the user gave another, sizes buffers.
        self.speculative_num_steps: int = server_args.speculative_num_steps
        self.speculative_num_draft_tokens = self.speculative_num_steps + 1
        self.context_len: int = target_worker.model_runner.model_config.context_len
        self.ranks = Ranks.of_model()
        self.rank_check = RankCheck(self.ranks) if check_wanted() else None
        self.config = self._effective(load_config())
        check_for_ranks(self.config, self.ranks)
        self.telemetry = Telemetry(self.config)
        self.telemetry.ranks = self._describe_ranks
        logger.info("ASPIRE: %s", describe(self.config))

    @property
    def draft_worker(self) -> None:
        """There is no draft model."""
        return None

    @property
    def model_runner(self) -> Any:
        return self.target_worker.model_runner

    @property
    def gamma_max(self) -> int:
        """Most drafts before a verify."""
        return self.config.gamma_max

    def _effective(self, config: AspireConfig) -> AspireConfig:
        return config.model_copy(update={"gamma_max": self.speculative_num_steps})

    # -- start-up, in the order in which SGLang calls it --

    def alloc_memory_pool(self, req_to_token_pool: Any = None, **kwargs: Any) -> None:
        super().alloc_memory_pool(req_to_token_pool=req_to_token_pool, **kwargs)
        self.state = DraftState(
            num_slots=req_to_token_pool.req_to_token.shape[0],
            gamma_max=self.gamma_max,
            device=req_to_token_pool.req_to_token.device,
            make_acceptance=self._new_estimator,
        )
        self.plain = PlainSteps(self, req_to_token_pool, self.gamma_max + 1)

    def init_cuda_graphs(self) -> None:
        """Last call before serving: fit the step costs and print what was decided."""
        self.cost = start_up_cost(self)
        self.telemetry.cost = self.cost.report
        self._apply_config(self.config)
        logger.info("ASPIRE: step cost: %s", self.cost.describe())
        log_forecast(self)

    profile_lengths: tuple[int, ...] = (256, 1536, 5120)
    profile_rows: tuple[int, ...] = (1, 4)
    profile_repeats = 3

    def profile_step(
        self, slots: list[int], seq_len: int, pending: int, verify: bool
    ) -> tuple[StepShape, Callable[[], float]]:
        """A synthetic step of equal rows: its shape, and a function that times it once."""
        return host_step(self, slots, seq_len, pending, verify)

    def _make_sampler(self) -> Any:
        scheduler = self.config.scheduler
        return StepSampler(
            self.state,
            confidence=scheduler.confidence,
            sampled=scheduler.sampled_confidence,
            gaps=scheduler.predictor == "regression",
        )

    def _apply_config(self, config: AspireConfig) -> None:
        context = self.model_runner.attn_backend.configure_context(config.context)
        self.config = config
        scheduler = config.scheduler
        regression = scheduler.predictor == "regression"
        self.state.use_judges(AcceptancePredictor if regression else ConfidenceCalibration)
        self.sampler = self._make_sampler()
        self.modes = ModeScheduler(scheduler, self.gamma_max, context, self.cost, self.state)
        self.telemetry.config = self.config
        self.plain.interrupt()
        logger.info("ASPIRE: sparse context: %s", context.describe())

    def _describe_ranks(self) -> dict[str, int]:
        described = {"tp_size": self.ranks.size}
        if self.rank_check is not None:
            described["checked_steps"] = self.rank_check.steps
        return described

    def _new_estimator(self) -> AcceptanceEstimator:
        settings = self.config.scheduler.acceptance
        prior = {"ema": "start", "beta": "prior_rate"}[settings.kind]
        return make_estimator(settings.kind, **{prior: settings.prior})

    def reload_config(self) -> None:
        """Read the file given as ``--aspire-config`` again and use it from the next step on.

        Raises:
            ConfigError: the file is not valid, or asks for what needs a restart.
        """
        config = self.ranks.from_first(load_config)
        check_for_ranks(config, self.ranks)
        if "gamma_max" not in config.model_fields_set:
            most = min(config.gamma_max, self.speculative_num_steps)
            config = config.model_copy(update={"gamma_max": most})
        if config.gamma_max > self.speculative_num_steps:
            raise ConfigError(
                f"gamma_max {config.gamma_max} needs a restart: this server holds at most "
                f"{self.speculative_num_steps} drafts per request"
            )
        try:
            self._apply_config(config)
        except ValueError as fault:
            raise ConfigError(str(fault)) from None

    # -- serving --

    def forward_batch_generation(
        self, batch: Any, on_publish: Any = None, **_: Any
    ) -> GenerationBatchResult:
        """One scheduler step; see ``sglang.srt.managers.scheduler.Scheduler.run_batch``."""
        if batch.spec_algorithm.is_none():
            return self.plain.forward(batch, self._plain_forward)
        step = self._prefill if batch.forward_mode.is_extend() else self._decode
        result = step(batch)
        if on_publish is not None and result.new_seq_lens is not None:
            on_publish(result.new_seq_lens)
        return result

    def _prefill(self, batch: Any) -> GenerationBatchResult:
        for req in batch.reqs:
            self.state.reset(req.req_pool_idx, self._generation(req))
            if not req.output_ids:
                self.telemetry.started(req.rid)
        restore_penalties(batch.reqs, batch.sampling_info)
        result = self.target_worker.forward_batch_generation(batch)
        result.next_token_ids = self.ranks.first(result.next_token_ids)
        if not batch.enable_overlap:
            # A phase that this batch joins finds tokens where overlap scheduling leaves them.
            self.relay.output_tokens_buf[batch.req_pool_indices] = result.next_token_ids.long()
        result.new_seq_lens = batch.seq_lens.clone()
        result.next_draft_input = NextStepInput(bonus_tokens=result.next_token_ids)
        result.speculative_num_draft_tokens = self.speculative_num_draft_tokens
        return result

    def _decode(self, batch: Any) -> GenerationBatchResult:
        start = time.perf_counter()
        slots, seq_lens, states, _ = running = self.running(batch)
        verify, draft_kv = self.modes.decide(*running)
        plan = build_plan(
            slots=slots,
            seq_lens=seq_lens,
            pending=[state.pending for state in states],
            verify=verify,
            bonus=batch.spec_info.bonus_tokens,
            draft_tokens=self.state.tokens,
            req_to_token=self.req_to_token_pool.req_to_token,
        )
        context = self.model_runner.attn_backend.context
        if self.rank_check is not None and context.layer_lists is None:
            self.rank_check.compare(plan, context.lists, tuple(self.cost.model.coefficients))
        bonus = batch.spec_info.bonus_tokens
        forward = self._forward(batch, plan)
        outcome = self._sample(batch, plan, states, forward)
        outcome, seconds = agree_on_outcome(
            self.ranks, plan, self.state, states, outcome, time.perf_counter() - start
        )
        self.cost.observe(plan.shape(draft_kv), seconds)
        result = self._settle(batch, plan, states, bonus, forward, outcome)
        self.telemetry.step(
            drafts=len(plan.draft_rows),
            verifies=len(plan.verify_rows),
            tokens=plan.num_tokens,
            seconds=time.perf_counter() - start,
        )
        return result

    def _forward(self, batch: Any, plan: StepPlan) -> GenerationBatchResult:
        # SGLang snapshots the batch around this call, so it may be rebound freely.
        batch.forward_mode = ForwardMode.TARGET_VERIFY
        batch.input_ids = plan.input_ids
        batch.out_cache_loc = plan.out_cache_loc
        batch.spec_info = MixedForwardInput(plan)
        wanted = batch.return_hidden_states
        forward_batch = ForwardBatch.init_new(
            batch,
            self.model_runner,
            capture_hidden_mode=CaptureHiddenMode.FULL if wanted else CaptureHiddenMode.NULL,
            return_hidden_states_before_norm=False,
        )
        return self.target_worker.forward_batch_generation(
            None, forward_batch=forward_batch, is_verify=True
        )

    def _sample(
        self,
        batch: Any,
        plan: StepPlan,
        states: list[SlotState],
        forward: GenerationBatchResult,
    ) -> Accepted:
        """Sample drafts and accept runs."""
        logits = forward.logits_output.next_token_logits[: plan.num_tokens]
        apply_logit_rules(plan, batch.reqs, self.state.tokens, logits, batch.sampling_info)
        seeds = seeds_of(batch.reqs)
        return self.sampler.step(plan, states, logits, batch.sampling_info, seeds)

    def _settle(
        self,
        batch: Any,
        plan: StepPlan,
        states: list[SlotState],
        bonus: torch.Tensor,
        forward: GenerationBatchResult,
        outcome: Accepted,
    ) -> GenerationBatchResult:
        """Book the accepted runs, and describe the outcome to SGLang."""
        logits = forward.logits_output.next_token_logits[: plan.num_tokens]
        rows = plan.verify_rows
        if batch.return_logprob:
            report_logprobs(
                forward.logits_output,
                batch,
                rows,
                plan.pending,
                logits[len(plan.draft_rows) :],
                outcome.tokens,
                outcome.accept_lens,
            )
        if batch.return_hidden_states:
            report_hidden_states(
                forward.logits_output,
                rows,
                plan.pending,
                outcome.accept_lens,
                self.speculative_num_draft_tokens,
            )
        advance = torch.zeros(len(states), dtype=batch.seq_lens.dtype)
        bonus = bonus.clone()
        for verified, row in enumerate(rows):
            accept_len = outcome.accept_lens[verified]
            drafts = plan.pending[row]
            advance[row] = accept_len
            bonus[row] = outcome.tokens[verified, accept_len - 1]
            self.state.settle(states[row], accept_len - 1)
            self.telemetry.verified(batch.reqs[row].rid, drafts, accept_len - 1)
        result = GenerationBatchResult(
            logits_output=forward.logits_output,
            next_token_ids=outcome.tokens.flatten(),
            accept_lens=torch.tensor(outcome.accept_lens, dtype=torch.int32),
            cap_lens=torch.tensor([plan.pending[row] for row in rows], dtype=torch.int32),
            new_seq_lens=batch.seq_lens + advance.to(batch.seq_lens.device),
            next_draft_input=NextStepInput(bonus_tokens=bonus),
            speculative_num_draft_tokens=self.speculative_num_draft_tokens,
            can_run_cuda_graph=forward.can_run_cuda_graph,
        )
        setattr(result, VERIFIED, [Verified(rows)])
        return result

    def _generation(self, req: Any) -> int:
        return int(self.req_to_token_pool.req_generation[req.req_pool_idx])

    def _max_draft(self, req: Any, seq_len: int, unsettled: int = 0) -> int:
        """Most drafts that can still be of use to this request, 0 if it must verify now.

        Args:
            seq_len: tokens with final KV, at most.
            unsettled: most committed tokens that ``req.output_ids`` does not hold yet.
        """
        if req.to_finish is not None:
            # An abort is honoured when the row's result is processed, so give it one at once.
            return 0
        own = draft_limit(req.sampling_params.custom_params)
        most = self.gamma_max if own is None else min(own, self.gamma_max)
        remaining = req.sampling_params.max_new_tokens - len(req.output_ids) - unsettled
        # A verify commits one token more than it accepts; positions end at the context length.
        return max(0, min(most, remaining - 1, self.context_len - 1 - seq_len))

    def _may_draft(self, req: Any, state: SlotState) -> bool:
        """Whether the request's grammar, if it has one, allows a draft after the pending ones."""
        if req.grammar is None:
            return True
        drafts = self.state.tokens[req.req_pool_idx, : state.pending].tolist()
        return not run_is_complete(req, drafts, self.model_runner.model_config.vocab_size)

    def running(self, batch: Any) -> Running:
        """The requests of a batch as the online scheduler sees them."""
        states = [self.state.get(req.req_pool_idx, self._generation(req)) for req in batch.reqs]
        seq_lens: list[int] = batch.seq_lens_cpu.tolist()
        caps = [
            self._max_draft(req, s) if self._may_draft(req, state) else 0
            for req, s, state in zip(batch.reqs, seq_lens, states, strict=True)
        ]
        return Running([req.req_pool_idx for req in batch.reqs], seq_lens, states, caps)

    # -- events --

    def clear_cache_pool(self) -> None:
        self.state.clear()

    def update_weights_from_disk(self, recv_req: Any) -> tuple[bool, str]:
        return True, "ASPIRE has no draft weights."

    def update_weights_from_ipc(self, recv_req: Any) -> tuple[bool, str]:
        return True, "ASPIRE has no draft weights."

    def update_weights_from_tensor(self, recv_req: Any) -> tuple[bool, str]:
        return self.target_worker.update_weights_from_tensor(recv_req)
