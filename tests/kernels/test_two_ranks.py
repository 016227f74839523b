"""The GPU's mixed step and its worker on two tensor-parallel ranks: two processes over gloo, each
with Triton's interpreter and its share of the heads."""

from __future__ import annotations

import contextlib
import itertools
import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang.srt.speculative.base_spec_worker")

from aspire_sglang.attention.gpu_mixed import GpuMixedAttention
from aspire_sglang.attention.mixed import AttentionSpec
from aspire_sglang.attention.step_buffers import HostStep, StepBuffers
from aspire_sglang.attention.triton_mixed import TritonMixedAttention
from aspire_sglang.context.selection import SelectionConfig
from aspire_sglang.context.sparse import RefreshConfig, SparseContext
from aspire_sglang.runtime import gpu_burst
from aspire_sglang.runtime import plain_steps as plain_steps_module
from aspire_sglang.runtime.device_sampler import DeviceSampler
from aspire_sglang.runtime.device_state import DeviceState
from aspire_sglang.runtime.rank_check import RankCheck, RanksDisagree
from aspire_sglang.runtime.ranks import Ranks
from aspire_sglang.speculation.clock_check import WINDOW_STEPS, ClockCheck
from aspire_sglang.speculation.cost_model import StepShape
from aspire_sglang.speculation.plain_speed import PlainSpeed
from tests.kernels import test_gpu_worker
from tests.kernels.step_model import lay_out
from tests.two_ranks import SIZE, on_two_ranks

# Two more processes that import SGLang and Triton take over a minute on two cores.
pytestmark = pytest.mark.slow

KV_HEADS, GROUP, DIM, WIDTH, PAGE = 2, 2, 64, 320, 16
REDUCTIONS = ("max", "mean", "sum")


class Heard(Ranks):
    """A rank that is alone and keeps every vote."""

    def __init__(self) -> None:
        super().__init__()
        self.scores: list[torch.Tensor] = []

    def votes(self, scores, reduction):
        self.scores.append(scores.clone())
        return scores


def page_lists(
    ranks: Ranks, reduction: str, share: int, shares: int, reads_all: bool = False
) -> list[list[list[int]]]:
    """Lists after a prefill and after a mixed step, as seen by one of ``shares`` equal ranks."""
    torch.manual_seed(5)
    slots = 4 * WIDTH
    k, v = (torch.randn(slots, KV_HEADS, DIM).chunk(shares, 1)[share].contiguous() for _ in "kv")
    queries = 2 * torch.randn(2, 8, KV_HEADS * GROUP, DIM)
    q = queries.chunk(shares, dim=2)[share].contiguous()
    heads = KV_HEADS // shares
    spec = AttentionSpec(GROUP * heads, heads, DIM, 1, torch.float32, torch.float32, 0.125)
    table = torch.arange(slots, dtype=torch.int32).view(4, WIDTH)
    mixed = GpuMixedAttention(
        TritonMixedAttention(spec, max_seqlen_q=5, device="cpu"),
        SparseContext(
            SelectionConfig(PAGE, 6, 0.1, 1, 2, reduction),  # type: ignore[arg-type]
            RefreshConfig("refresh", layer=0, same_step=True),
            num_layers=2,
            num_slots=4,
            context_len=WIDTH,
        ),
        req_to_token=table,
        page_size=1,
        max_rows=4,
        max_seqlen_q=5,
        refresh_reads_all=reads_all,
        ranks=ranks,
    )
    layer = SimpleNamespace(layer_id=0, scaling=0.125, logit_cap=0.0)
    found = []

    def note() -> None:
        lists = mixed.context.lists
        found.append([lists.pages[s, : lists.counts[s]].tolist() for s in (1, 2)])

    mixed.plan_prefill(torch.tensor([1, 2]), torch.tensor([230, 300]), torch.tensor([4, 8]))
    mixed.vote_prefill(layer, q[0], k, v)
    note()
    state = SimpleNamespace(
        bonus=torch.zeros(4, dtype=torch.int64),
        drafts=torch.zeros((4, 4), dtype=torch.int64),
        pending=torch.zeros(4, dtype=torch.int64),
    )
    step = HostStep.build([1, 2], [1, 2], [False, True])
    view = lay_out(StepBuffers(4, 8, "cpu"), step, 4, 8, torch.tensor([230, 300]), state, table)
    mixed.plan(view)
    mixed.attend(layer, q[1], k, v, torch.zeros_like(q[1]))
    note()
    return found


def expected_lists(reduction: str) -> list[list[list[int]]]:
    """The same from the scores of both ranks' heads, by the reference of the selection."""
    from aspire_sglang.context.selection import select_pages

    heard = [Heard() for _ in range(SIZE)]
    for share, ranks in enumerate(heard):
        # Where draft rows read everything, scores do not depend on the lists before.
        page_lists(ranks, reduction, share, SIZE, reads_all=True)
    config = SelectionConfig(PAGE, 6, 0.1, 1, 2, reduction)  # type: ignore[arg-type]
    found = []
    for step, lens in enumerate(([230, 300], [232, 303])):
        both = torch.stack([ranks.scores[step] for ranks in heard])
        scores = both.amax(0) if reduction == "max" else both.sum(0)
        rows = []
        for row, length in enumerate(lens):
            pages = -(-length // PAGE)
            chosen = select_pages(scores[row : row + 1, :pages], torch.tensor([length]), config)
            rows.append([page for page in chosen.pages[0].tolist() if page >= 0])
        found.append(rows)
    return found


def serve(ranks: Ranks, patch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A worker whose clock runs differently on every rank: mixed steps and phases of plain ones."""
    patch.setattr(Ranks, "of_model", classmethod(lambda cls: ranks))
    patch.setenv("ASPIRE_CHECK_RANKS", "1")
    made = test_gpu_worker.make(patch, [5, 10, 15])
    patch.setattr(test_gpu_worker.Event, "elapsed_time", lambda self, other: 9.0 + 2.0 * ranks.rank)
    made._plain_graphs = SimpleNamespace(places=lambda rows: 4, in_use=contextlib.nullcontext)
    lengths = iter([0, 9, 0, 0, 8] + 40 * [0])
    made.modes.plain_steps = lambda slots, lens, states, caps: (
        0 if any(state.pending for state in states) else next(lengths)
    )
    target = made.target_worker.forward_batch_generation

    def parted(batch, forward_batch=None, is_verify=False):
        result = target(batch, forward_batch, is_verify)
        if batch is not None and ranks.rank:
            # Only the first rank's sampler is to count.
            result.next_token_ids += 3
        return result

    made.target_worker.forward_batch_generation = parted
    batch = test_gpu_worker.Batch([10, 20, 30], new_tokens=200)
    batch.sampling_info.is_all_greedy = False
    test_gpu_worker.start(made, batch)
    steps = 60
    for _ in range(steps):
        plain_steps_module.prepare_for_decode(lambda batch: None, batch)
        batch.process(batch.snapshot(), batch.decode(made))
    totals = made.telemetry.totals
    report = made.cost.report()
    # As if the clocks had measured a phase differently as well.
    made.cost.plain_speed = PlainSpeed()
    shape = StepShape(3, 60, 60)
    predicted = made.cost.model.predict(shape)
    made.note_plain_phase(9, shape, (0.5 + 0.3 * ranks.rank) * predicted)
    return {
        "rest": rest_by_the_clock(made, ranks, batch, patch),
        "checked": made.rank_check.steps,
        "steps": steps,
        "tokens": [req.output_ids for req in batch.reqs],
        "observed": "mean_relative_error" in report,
        "coefficients": list(made.cost.model.coefficients),
        "plain_ratio": made.cost.plain_speed.ratio(3, predicted),
        "plain_steps": totals["plain_graph_steps"],
        "described": made.telemetry.snapshot()["ranks"],
    }


def rest_by_the_clock(made: Any, ranks: Ranks, batch: Any, patch: pytest.MonkeyPatch) -> int:
    """Drafting wins by the first rank's clock; by the second's, which runs faster, it loses."""
    now = itertools.count(0.0, 0.3 * 10**ranks.rank)
    patch.setattr(gpu_burst, "time", SimpleNamespace(perf_counter=lambda: next(now)))
    made.modes.clock_check = check = ClockCheck()
    running = made.running(batch)
    predicted = made.cost.model.predict(running.plain_shape())
    plain = made.cost.plain_speed.seconds(len(batch.reqs), predicted)
    made.clock.interrupt(plain=True)
    # The first burst is behind plain steps and does not count.
    for tokens in (0, round(1.5 * len(batch.reqs) * 0.3 / plain)):
        burst = made.clock.begin(running)
        for _ in range(WINDOW_STEPS):
            made.clock.launched(burst, 1e-2)
        for step in range(WINDOW_STEPS):
            made.clock.reported(burst, tokens if step == 0 else 0)
    return check.rest


def disagreements(ranks: Ranks) -> list[str]:
    """What the check says of steps about which the ranks differ in one thing each."""
    check = RankCheck(ranks)
    context = SparseContext(
        SelectionConfig(PAGE, 6, 0.1, 1, 2, "max"),
        RefreshConfig("refresh", layer=0, same_step=True),
        num_layers=2,
        num_slots=4,
        context_len=WIDTH,
    )
    step = HostStep.build([1, 2], [1, 2], [False, True])
    view = StepBuffers(4, 8, "cpu").view(4, 8)
    batch = SimpleNamespace(
        reqs=[1, 2],
        req_pool_indices=torch.tensor([1, 2]),
        seq_lens=torch.tensor([5, 6]),
        input_ids=torch.tensor([7, 8]),
        out_cache_loc=torch.tensor([9, 10]),
    )
    found = []

    def compare(plain: bool = False) -> None:
        try:
            if plain:
                check.compare_plain(batch, (1.0,))
            else:
                check.compare_staged(step, view, context.lists, (1.0,))
        except RanksDisagree as fault:
            found.append(str(fault).split(" about the ")[1].split(" of ")[0])

    compare()
    compare(plain=True)
    # Padding and what lies behind a list are nobody's decision.
    view.input_ids[6] = ranks.rank
    context.lists.pages[1] = ranks.rank
    compare()
    compare(plain=bool(ranks.rank))
    batch.input_ids[0] += ranks.rank
    compare(plain=True)
    context.lists.counts[2] = ranks.rank
    compare()
    view.out_cache_loc[0] = ranks.rank
    compare()
    return [*found, str(check.steps)]


def filtered(ranks: Ranks) -> list[int]:
    """Tokens of rows with filters, which every rank's own arithmetic made different."""
    steps = StepBuffers(4, 8, "cpu")
    sampler = DeviceSampler(DeviceState(4, 4, "cpu"), steps, ranks)
    view = steps.view(4, 8)
    view.cu_seqlens_q[:3] = torch.tensor([0, 1, 4])
    view.slots[:2] = torch.tensor([1, 2])
    view.draft[:2] = torch.tensor([1, 0])
    sampler._choose_filtered = lambda step, view, logits, rows: view.next_tokens.fill_(  # type: ignore
        10 + ranks.rank
    )
    info = SimpleNamespace(
        temperatures=torch.ones(2), top_ks=torch.ones(2), top_ps=torch.ones(2), min_ps=torch.ones(2)
    )
    params = [SimpleNamespace(top_k=5, temperature=1.0, top_p=0.5, min_p=0.0)] * 2
    step = HostStep.build([1, 2], [0, 2], [False, True])
    sampler.step(step, view, torch.zeros(4, 9), info, params, filtered=True, chosen=False)
    return view.next_tokens[: step.num_tokens].tolist()


def observe(ranks: Ranks) -> dict[str, Any]:
    rank = ranks.rank
    seen: dict[str, Any] = {
        f"lists {reduction}": page_lists(ranks, reduction, rank, SIZE) for reduction in REDUCTIONS
    }
    seen |= {
        f"lists {reduction}, reads all": page_lists(ranks, reduction, rank, SIZE, reads_all=True)
        for reduction in REDUCTIONS
    }
    seen["disagreements"] = disagreements(ranks)
    seen["filtered"] = filtered(ranks)
    with pytest.MonkeyPatch.context() as patch:
        seen["served"] = serve(ranks, patch)
    return seen


@pytest.fixture(scope="module")
def seen() -> list[dict[str, Any]]:
    """What each of two ranks saw."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        assert os.environ["TRITON_INTERPRET"] == "1"
        return on_two_ranks(observe)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_all_heads_vote_for_the_same_pages(seen, reduction):
    lists = [one[f"lists {reduction}"] for one in seen]
    assert lists[0] == lists[1]
    reading_all = [one[f"lists {reduction}, reads all"] for one in seen]
    assert reading_all[0] == reading_all[1] == expected_lists(reduction)
    # A rank by itself would choose others.
    alone = [page_lists(Ranks(), reduction, share, SIZE) for share in range(SIZE)]
    assert alone[0] != lists[0]
    assert alone[1] != lists[0]


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_sums_choose_the_pages_of_one_rank_with_all_heads(seen, reduction):
    assert seen[0][f"lists {reduction}"] == page_lists(Ranks(), reduction, 0, 1)


def test_ranks_with_different_clocks_go_on_alike(seen):
    first, second = (one["served"] for one in seen)
    for served in (first, second):
        assert served["checked"] == served["steps"]
        assert served["described"] == {"tp_size": 2, "checked_steps": served["steps"]}
        assert served["observed"]
        assert served["plain_steps"] == 17
        assert served["plain_ratio"] == pytest.approx(0.5)
        assert served["rest"] == 0
    for what in ("tokens", "coefficients"):
        assert first[what] == second[what]


def test_the_check_names_what_differs_on_a_gpu(seen):
    for one in seen:
        # Three steps were alike; a plain step beside a mixed one differs in the requests first.
        assert one["disagreements"] == ["requests", "tokens", "page lists", "KV slots", "3"]


def test_filtered_tokens_are_the_first_ranks(seen):
    assert [one["filtered"] for one in seen] == [[10] * 4] * 2
