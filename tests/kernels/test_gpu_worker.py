"""The GPU worker's bookkeeping with a model that only counts, in Triton's interpreter."""

from __future__ import annotations

import contextlib
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang.srt.speculative.base_spec_worker")

from aspire_sglang.attention.step_buffers import StepBuffers
from aspire_sglang.context.selection import SelectionConfig
from aspire_sglang.context.sparse import RefreshConfig, SparseContext
from aspire_sglang.runtime import gpu_burst, gpu_profile, gpu_worker, plain_requests, worker
from aspire_sglang.runtime import plain_steps as plain_steps_module
from aspire_sglang.runtime.plain_steps import PLAIN_PHASE
from aspire_sglang.runtime.results import VERIFIED, join_runs, process_verified_rows
from aspire_sglang.speculation import clock_check

VOCAB, GAMMA, WIDTH = 50, 4, 128


class Event:
    def __init__(self, **_: Any) -> None: ...
    def record(self) -> None: ...
    def elapsed_time(self, _: Event) -> float:
        return 1.0


class Target:
    """The next token is the last one plus one, except after multiples of seven for drafts."""

    enable_spec = True

    def __init__(self, tiers: list[int] | None) -> None:
        context = SparseContext(
            SelectionConfig(),
            RefreshConfig("refresh", 0, True),
            num_layers=2,
            num_slots=4,
            context_len=WIDTH,
        )
        graphs = SimpleNamespace(capture_num_tokens=tiers, max_bs=3) if tiers else None
        self.model_runner = SimpleNamespace(
            model_config=SimpleNamespace(context_len=100, vocab_size=VOCAB),
            device="cpu",
            page_size=1,
            spec_algorithm=None,
            decode_cuda_graph_runner=graphs,
            capture_tail_hooks=[],
            attn_backend=SimpleNamespace(
                steps=StepBuffers(4, 15, "cpu"),
                drafts_vote=True,
                context=context,
                configure_context=lambda config: context,
            ),
        )
        self.seen: list[Any] = []

    def forward_batch_generation(self, batch, forward_batch=None, is_verify=False):
        if batch is not None:
            # A prefill, or a step of plain decoding with SGLang's sampler.
            assert self.enable_spec == batch.forward_mode.is_extend()
            tokens = (batch.input_ids + 1) % VOCAB
            if not batch.forward_mode.is_extend():
                places = batch.req_to_token_pool.req_to_token[
                    batch.req_pool_indices, batch.seq_lens - 1
                ]
                assert batch.out_cache_loc.tolist() == places.tolist()
            return SimpleNamespace(
                next_token_ids=tokens.int(), can_run_cuda_graph=True, delay_sample_func=None
            )
        self.seen.append(forward_batch)
        ids = forward_batch.input_ids
        output = SimpleNamespace(
            next_token_logits=torch.nn.functional.one_hot((ids + 1) % VOCAB, VOCAB).float()
        )
        layout = forward_batch.spec_info.ragged_verify_layout
        if layout is not None:
            places = min(layout.graph_num_tokens, self.model_runner.decode_cuda_graph_runner.max_bs)
            for hook in self.model_runner.capture_tail_hooks:
                hook(None, output, SimpleNamespace(batch_size=places), layout.graph_num_tokens)
        return SimpleNamespace(logits_output=output, can_run_cuda_graph=layout is not None)


def make(monkeypatch, tiers=None):
    monkeypatch.setattr(worker, "verify_hooks", lambda: None)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(gpu_worker, "PlainGraphs", lambda runner: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(
        gpu_worker.ForwardBatch,
        "init_new",
        lambda batch, runner, **_: SimpleNamespace(
            input_ids=batch.input_ids, spec_info=batch.spec_info
        ),
    )
    monkeypatch.setenv(
        "ASPIRE_CONFIG", "{scheduler: {policy: fixed, gamma: 3}, cost_profile: false}"
    )
    args = SimpleNamespace(speculative_num_steps=GAMMA, random_seed=1)
    made = gpu_worker.GpuWorker(server_args=args, target_worker=Target(tiers))
    table = torch.arange(4 * WIDTH, dtype=torch.int32).view(4, WIDTH)
    pool = SimpleNamespace(
        req_to_token=table, req_generation=torch.ones(4, dtype=torch.int64), size=3
    )
    made.alloc_memory_pool(
        req_to_token_pool=pool, token_to_kv_pool_allocator=SimpleNamespace(size=4 * WIDTH)
    )
    made.init_cuda_graphs()
    # SGLang's relay of tokens is the worker's own memory.
    made.plain.attach(Relay())
    return made


def bursting(monkeypatch, most: int, policy: str, noisy: bool = False):
    """A worker that launches up to ``most`` steps for a result."""
    monkeypatch.setattr(gpu_burst, "BURST_STEPS", most)
    monkeypatch.setattr(gpu_burst, "BURST_SECONDS", 1.0)
    made = make(monkeypatch, [2, 5, 10, 15])
    monkeypatch.setenv("ASPIRE_CONFIG", f"{{scheduler: {{policy: {policy}}}, cost_profile: false}}")
    made.reload_config()
    made.mixed_graphs = Graphs(made, noisy)
    return made


class Relay:
    """What a batch of plain steps needs of SGLang's relay; without overlap lengths are on it."""

    def share_tokens(self, tokens) -> None:
        self.output_tokens_buf = tokens

    def resolve_seq_lens_cpu(self, batch) -> None: ...


class Algorithm:
    def __init__(self, none: bool) -> None:
        self.is_none = lambda: none


class Batch:
    spec_algorithm = Algorithm(False)
    spec_info = input_embeds = seq_lens_cpu = None
    enable_overlap = False
    late = False
    end = None
    """A token that ends a request."""

    def __init__(self, prompts: list[int], new_tokens: int) -> None:
        self.reqs = [
            SimpleNamespace(
                rid=str(i),
                req_pool_idx=i + 1,
                kv_committed_len=length,
                output_ids=[],
                kv=SimpleNamespace(kv_allocated_len=WIDTH),
                decode_batch_idx=0,
                spec_verify_ct=0,
                accepted=0,
                spec_correct_drafts_histogram=[],
                spec_cap_lens_histogram=[],
                is_retracted=False,
                to_finish=None,
                finished=lambda: False,
                finished_reason=None,
                finished_len=None,
                _check_token_based_finish=lambda run: self.end in run,
                _check_str_based_finish=lambda count: False,
                sampling_params=SimpleNamespace(
                    max_new_tokens=new_tokens,
                    top_k=1,
                    temperature=1.0,
                    custom_params=None,
                    **plain_requests.SAMPLING,
                ),
            )
            for i, length in enumerate(prompts)
        ]
        self.seq_lens = torch.tensor(prompts)
        self.req_pool_indices = torch.arange(1, len(prompts) + 1)
        self.input_ids = torch.tensor(prompts) % VOCAB
        self.sampling_info = SimpleNamespace(
            is_all_greedy=True, penalizer_orchestrator=SimpleNamespace(is_required=False)
        )
        self.forward_mode = SimpleNamespace(is_extend=lambda: True)
        # Of SGLang's log: verifies since the last line.
        self.metrics_reporter = SimpleNamespace(spec_num_forward_ct=0)

    def maybe_evict_swa(self) -> None: ...

    def leave(self, row: int) -> None:
        """A request finished, and SGLang filters the batch."""
        kept = [i for i in range(len(self.reqs)) if i != row]
        self.reqs[row].finished = lambda: True
        self.reqs = [self.reqs[i] for i in kept]
        self.seq_lens, self.req_pool_indices = self.seq_lens[kept], self.req_pool_indices[kept]

    def snapshot(self):
        return SimpleNamespace(reqs=self.reqs[:])

    def decode(self, worker):
        self.forward_mode = SimpleNamespace(is_extend=lambda: False)
        result = worker.forward_batch_generation(self)
        if not self.spec_algorithm.is_none():
            self.seq_lens = result.new_seq_lens
            self.spec_info = result.next_draft_input
        else:
            # SGLang's relay.
            worker.device_state.bonus[self.req_pool_indices] = result.next_token_ids.long()
        return result

    def process(self, batch, result):
        """What SGLang does with a result, one step late with overlap scheduling."""
        phase = getattr(result, PLAIN_PHASE, None)
        if phase is not None:

            def original(batch, result):
                for req, token in zip(batch.reqs, result.next_token_ids.tolist(), strict=True):
                    req.output_ids.append(token)

            return phase.owner.process(phase, batch, result, original)
        result.copy_done = SimpleNamespace(synchronize=lambda: None)
        return process_verified_rows(Batch.process_rows, self, batch, result)

    def process_rows(self, batch, result):
        """SGLang shows a streamed request's tokens once per result: nobody may be in it twice."""
        assert len({req.rid for req in batch.reqs}) == len(batch.reqs)
        verifies = sum(req.spec_verify_ct for req in batch.reqs)
        runs = join_runs(Batch.resolve, self, result, batch)
        self.metrics_reporter.spec_num_forward_ct += len(batch.reqs)
        going_on = [req for req in batch.reqs if not req.finished()]
        assert result.num_correct_drafts == sum(map(len, runs)) - len(batch.reqs)
        if len(going_on) == len(batch.reqs):
            verifies = sum(req.spec_verify_ct for req in batch.reqs) - verifies
            assert self.metrics_reporter.spec_num_forward_ct == verifies
        self.metrics_reporter.spec_num_forward_ct = 0
        for req, run in zip(batch.reqs, runs, strict=True):
            if req in going_on:
                req.output_ids += run
                if self.end in run:
                    req.finished = lambda: True

    def resolve(self, result, batch):
        lens, stride = result.accept_lens.tolist(), result.speculative_num_draft_tokens
        tokens = result.next_token_ids.view(-1, stride).tolist()
        result.num_correct_drafts = sum(lens) - len(lens)
        result.num_cap_tokens = result.cap_lens.sum().item()
        assert result.num_cap_tokens >= result.num_correct_drafts
        for i, req in enumerate(batch.reqs):
            if req.finished():
                # In the result before, unknown when this one was launched.
                assert self.late
                continue
            assert result.cap_lens[i] < stride
            req.kv_committed_len += lens[i]
            req.spec_verify_ct += 1
            req.accepted += lens[i] - 1
        return [run[:length] for run, length in zip(tokens, lens, strict=True)]


@pytest.mark.parametrize("late", [0, 1], ids=["at-once", "one-step-late"])
@pytest.mark.parametrize("tiers", [None, [5, 10, 15], [2]], ids=["eager", "graphs", "small-graph"])
def test_counts_on(monkeypatch, late, tiers):
    made = make(monkeypatch, tiers)
    batch = Batch([10, 20, 30], new_tokens=12)
    start(made, batch)
    queue = []
    for _ in range(16):
        queue.append((batch.snapshot(), batch.decode(made)))
        if len(queue) > late:
            batch.process(*queue.pop(0))
    for each in queue:
        batch.process(*each)
    for req, first in zip(batch.reqs, [11, 21, 31], strict=True):
        wanted = [(first + i) % VOCAB for i in range(len(req.output_ids))]
        assert len(wanted) >= 12
        assert req.output_ids == wanted
    assert batch.seq_lens.tolist() == [req.kv_committed_len for req in batch.reqs]
    totals = made.telemetry.totals
    assert totals["accepted_drafts"] > 20
    assert totals["discarded_drafts"] == 0
    eager = totals["eager_steps"] if tiers is None or len(tiers) == 1 else totals["graph_steps"]
    assert eager == 16
    assert all(state.unsettled == 0 for state in made.state._slots.values())


@pytest.mark.parametrize("late", [0, 1], ids=["at-once", "one-step-late"])
@pytest.mark.parametrize(
    "policy", ["staggered, gamma: 3", "staggered, gamma: 1", "fixed, gamma: 2"]
)
@pytest.mark.parametrize("most", [2, 3])
def test_bursts_write_what_single_steps_write(monkeypatch, late, policy, most):
    found = {}
    for steps in (1, most):
        made = bursting(monkeypatch, steps, policy)
        batch = Batch([10, 20, 30], new_tokens=14)
        batch.reqs[1].sampling_params.max_new_tokens = 9
        start(made, batch)
        queue, several = [], 0
        while any(len(r.output_ids) < r.sampling_params.max_new_tokens for r in batch.reqs):
            before = made._in_row
            result = batch.decode(made)
            several += made._in_row - before == most
            queue.append((batch.snapshot(), result))
            if len(queue) > late:
                batch.process(*queue.pop(0))
        for each in queue:
            batch.process(*each)
        assert (several > 2) == (steps > 1)
        assert batch.seq_lens.tolist() == [req.kv_committed_len for req in batch.reqs]
        assert all(state.unsettled == 0 for state in made.state._slots.values())
        assert made.telemetry.totals["accepted_drafts"] > 5
        found[steps] = [req.output_ids[: req.sampling_params.max_new_tokens] for req in batch.reqs]
    assert found[1] == found[most]
    assert [len(text) for text in found[1]] == [14, 9, 14]


@pytest.mark.parametrize("late", [0, 1], ids=["at-once", "one-step-late"])
def test_bursts_draw_the_same_samples(monkeypatch, late):
    """Whatever the drafts are worth: the noise belongs to a request and a position."""
    texts = []
    for steps in (1, 3):
        made = bursting(monkeypatch, steps, "staggered, gamma: 3", noisy=True)
        batch = Batch([10, 20, 30], new_tokens=16)
        for req in batch.reqs[:2]:
            params = req.sampling_params
            params.top_k, params.top_p, params.min_p = 1 << 30, 1.0, 0.0
            params.temperature = 0.8
        start(made, batch)
        queue, several = [], 0
        while any(len(req.output_ids) < 16 for req in batch.reqs):
            before = made._in_row
            queue.append((batch.snapshot(), batch.decode(made)))
            several += made._in_row - before == 3
            if len(queue) > late:
                batch.process(*queue.pop(0))
        for each in queue:
            batch.process(*each)
        assert (several > 3) == (steps > 1)
        totals = made.telemetry.totals
        assert totals["accepted_drafts"] > 5
        assert totals["discarded_drafts"] > 5
        texts.append([req.output_ids[:16] for req in batch.reqs])
    assert texts[0] == texts[1]
    assert len(set(texts[0][0])) > 8


@pytest.mark.parametrize("late", [0, 1], ids=["at-once", "one-step-late"])
@pytest.mark.parametrize("prompt", [42, 43, 44], ids=["ends late", "in between", "early"])
def test_a_request_without_drafts_takes_all_steps_of_a_burst(monkeypatch, late, prompt):
    found = {}
    for steps in (1, 3):
        made = bursting(monkeypatch, steps, "staggered, gamma: 3")
        batch = Batch([10, 20, prompt], new_tokens=60)
        batch.late, batch.end = bool(late), 0
        plain = batch.reqs[2]
        plain.sampling_params.custom_params = {"aspire": False}
        start(made, batch)
        queue, several, verified = [], 0, 0
        for _ in range(40):
            result = batch.decode(made)
            parts = getattr(result, VERIFIED)
            several += sum(2 in part.rows for part in parts) == 3
            verified += sum(part.rows.count(2) for part in parts) if plain in batch.reqs else 0
            queue.append((batch.snapshot(), result))
            if len(queue) > late:
                batch.process(*queue.pop(0))
            if plain in batch.reqs and plain.finished():
                batch.leave(2)
            if len(batch.reqs[0].output_ids) > 10 and plain.finished():
                break
        for each in queue:
            batch.process(*each)
        assert (several > 0) == (steps > 1)
        assert plain.output_ids == [*range(prompt + 1, VOCAB), batch.end]
        assert plain.spec_verify_ct == len(plain.output_ids) - 1
        stats = made.telemetry.snapshot()["requests"]["2"]
        assert stats["verify_steps"] == plain.spec_verify_ct
        # What was launched behind its end was not shown to anybody.
        assert verified - plain.spec_verify_ct <= 2 + 4 * late
        found[steps] = [req.output_ids[:10] for req in batch.reqs]
    assert found[1] == found[3]


@pytest.mark.parametrize("slow", [False, True])
def test_drafting_that_loses_by_the_clock_gives_way_to_plain_steps(monkeypatch, slow):
    made = bursting(monkeypatch, 3, "aspire")
    made._plain_graphs = SimpleNamespace(
        places=lambda rows: 4 if rows <= 4 else None, in_use=contextlib.nullcontext
    )
    # Whoever may draft drafts.
    monkeypatch.setattr(
        made.modes._policy.__class__, "plan", lambda *given, **_: [3] * len(given[1])
    )
    now = itertools.count(0.0, 0.1 if slow else 1e-6)
    monkeypatch.setattr(gpu_burst, "time", SimpleNamespace(perf_counter=lambda: next(now)))
    monkeypatch.setattr(clock_check, "WINDOW_STEPS", 12)
    batch = Batch([10, 20, 30], new_tokens=60)
    start(made, batch)
    for _ in range(24):
        made.plain.prepare(lambda batch: None, batch)
        batch.process(batch.snapshot(), batch.decode(made))
    totals = made.telemetry.totals
    assert (totals["plain_graph_steps"] > 10) == slow
    for req, first in zip(batch.reqs, [11, 21, 31], strict=True):
        assert req.output_ids == [(first + i) % VOCAB for i in range(len(req.output_ids))]
    assert totals["accepted_drafts"] > 5


class Graphs:
    """SGLang's graphs: they read the step from the buffers.

    ``noisy``: the model is not sure of the next token, and drafts see it a little differently.
    """

    def __init__(self, made, noisy: bool = False) -> None:
        self._runner = made.model_runner
        rng = torch.Generator().manual_seed(5)
        self._target = 2 * torch.randn((VOCAB, VOCAB), generator=rng)
        self._draft = self._target + 0.7 * torch.randn((VOCAB, VOCAB), generator=rng)
        self._noisy = noisy

    def replay(self, tokens: int):
        places = min(tokens, self._runner.decode_cuda_graph_runner.max_bs)
        view = self._runner.attn_backend.steps.view(places, tokens)
        ids = view.input_ids
        logits = torch.nn.functional.one_hot((ids + 1) % VOCAB, VOCAB).float()
        if self._noisy:
            drafts = view.draft[view.token_row.clamp(min=0).long()].bool()
            logits = torch.where(drafts[:, None], self._draft[ids], self._target[ids])
        for hook in self._runner.capture_tail_hooks:
            output = SimpleNamespace(next_token_logits=logits)
            hook(None, output, SimpleNamespace(batch_size=places), tokens)
        return logits


def test_a_burst_ends(monkeypatch):
    """Where slots are used up, no graph holds the next step, nobody drafts, or the device has
    enough to do."""
    monkeypatch.setattr(gpu_burst, "BURST_SECONDS", 1.0)
    made = make(monkeypatch, [3])
    made.mixed_graphs = Graphs(made)
    batch = Batch([10, 20, 30], new_tokens=40)
    start(made, batch)

    def steps() -> int:
        before = made._in_row
        batch.decode(made)
        return made._in_row - before

    # Ten slots in reserve hold four drafts and three steps that run behind three that run.
    assert steps() == 3
    # A verify of three drafts each has twelve tokens, more than the graph.
    assert steps() == 1
    assert [state.pending for state in made.state._slots.values()] == [0, 0, 0]
    monkeypatch.setattr(gpu_burst, "BURST_STEPS", 2)
    assert steps() == 2
    assert steps() == 1
    monkeypatch.setattr(gpu_burst, "BURST_SECONDS", 0.0)
    assert [steps() for _ in range(3)] == [1, 1, 1]
    made._in_row = 0
    monkeypatch.setattr(gpu_burst, "BURST_SECONDS", 1.0)
    # Three drafts each, then all verify.
    assert steps() == 1


def start(made, batch):
    batch.req_to_token_pool = made.req_to_token_pool
    first = made.forward_batch_generation(batch)
    batch.spec_info = first.next_draft_input
    for req, token in zip(batch.reqs, first.next_token_ids.tolist(), strict=True):
        req.output_ids.append(token)


@pytest.mark.parametrize("late", [0, 1], ids=["at-once", "one-step-late"])
def test_phases_of_plain_steps_between_mixed_ones(monkeypatch, late):
    made = make(monkeypatch, [5, 10, 15])
    made._plain_graphs = SimpleNamespace(
        places=lambda rows: 4 if rows <= 4 else None, in_use=contextlib.nullcontext
    )
    lengths = iter([3, 0, 1, 0, 5, 0, 2, 0, 1])
    seen = []

    def plain_steps(slots, seq_lens, states, caps):
        seen.append(seq_lens)
        return 0 if any(state.pending for state in states) else next(lengths)

    made.modes.plain_steps = plain_steps
    batch = Batch([10, 20, 30], new_tokens=60)
    start(made, batch)
    queue = []
    for _ in range(22):
        # SGLang's own preparation would be called while somebody drafts.
        plain_steps_module.prepare_for_decode(lambda batch: None, batch)
        queue.append((batch.snapshot(), batch.decode(made)))
        if len(queue) > late:
            batch.process(*queue.pop(0))
    for each in queue:
        batch.process(*each)
    if made.plain._phase is not None:
        made.plain._close(made.plain._phase)
    for req, first in zip(batch.reqs, [11, 21, 31], strict=True):
        wanted = [(first + i) % VOCAB for i in range(len(req.output_ids))]
        assert len(wanted) > 20
        assert req.output_ids == wanted
        # One from the prefill, the others counted once.
        assert 1 + req.spec_verify_ct + req.accepted == len(req.output_ids)
    totals = made.telemetry.totals
    assert totals["plain_graph_steps"] >= 9
    assert totals["accepted_drafts"] > 10
    assert all(state.unsettled == 0 for state in made.state._slots.values())
    assert made.state.get(1, 1).verifies == batch.reqs[0].spec_verify_ct


def test_no_phase_without_a_graph_that_holds_the_batch(monkeypatch):
    made = make(monkeypatch, [5, 10, 15])
    made._plain_graphs = SimpleNamespace(places=lambda rows: None)
    batch = Batch([10, 20, 30], new_tokens=12)
    start(made, batch)
    calls = []
    plain_steps_module.prepare_for_decode(calls.append, batch)
    assert calls == [batch]
    assert not batch.spec_algorithm.is_none()


@pytest.mark.parametrize("late", [0, 1], ids=["at-once", "one-step-late"])
def test_a_request_that_needs_plain_steps(monkeypatch, late):
    """Drafts of the others are dropped, all decode plainly while it runs, and draft again after."""
    made = make(monkeypatch, [5, 10, 15])
    # Not even a graph that holds the batch is needed.
    made._plain_graphs = None
    batch = Batch([10, 20, 30], new_tokens=90)
    start(made, batch)
    everybody, queue, totals = batch.reqs, [], made.telemetry.totals

    def run(steps):
        for _ in range(steps):
            plain_steps_module.prepare_for_decode(lambda batch: None, batch)
            queue.append((batch.snapshot(), batch.decode(made)))
            if len(queue) > late:
                batch.process(*queue.pop(0))

    run(6)
    states = [made.state.get(slot, 1) for slot in (1, 2, 3)]
    pending = sum(state.pending for state in states)
    assert pending > 0
    assert {state.plain_only for state in states} == {False}
    # As if it had joined now.
    everybody[1].return_logprob, states[1].plain_only = True, None
    drafted = totals["draft_rows"]
    run(20)
    assert batch.spec_algorithm.is_none()
    assert made.plain._phase.asking == {"1"}
    assert totals["draft_rows"] <= drafted + 3 * late
    assert totals["plain_steps_for_parameters"] == 20 - late
    assert totals["discarded_drafts"] == pending
    batch.leave(1)
    accepted = totals["accepted_drafts"]
    run(20)
    for each in queue:
        batch.process(*each)
    assert not batch.spec_algorithm.is_none()
    assert totals["plain_steps_for_parameters"] == 20
    assert totals["accepted_drafts"] > accepted + 10
    for req, first in zip(everybody, [11, 21, 31], strict=True):
        wanted = [(first + i) % VOCAB for i in range(len(req.output_ids))]
        assert len(wanted) > 20
        assert req.output_ids == wanted
        assert 1 + req.spec_verify_ct + req.accepted == len(req.output_ids) or req is everybody[1]
    assert all(state.unsettled == 0 for state in states)


def test_profile_restores_the_table(monkeypatch):
    made = make(monkeypatch, [5, 10, 15])
    monkeypatch.setattr(gpu_profile, "ForwardBatch", SimpleNamespace)
    before = made.req_to_token_pool.req_to_token.clone()
    made.profile_lengths, made.profile_rows = (30, 60), (1, 3)
    samples = gpu_worker_profile(made)
    assert len(samples) >= 6
    assert torch.equal(before, made.req_to_token_pool.req_to_token)


def gpu_worker_profile(made):
    from aspire_sglang.runtime.profile import profile_steps

    return profile_steps(made)
