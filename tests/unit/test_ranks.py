"""Tensor-parallel ranks agree: two processes with a share of the heads each, over gloo."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from aspire_sglang.attention.cpu_mixed import CpuMixedAttention
from aspire_sglang.attention.rows import ForwardRows
from aspire_sglang.context.selection import SelectionConfig
from aspire_sglang.context.sparse import RefreshConfig, SparseContext
from aspire_sglang.runtime.agreement import agree_on_outcome
from aspire_sglang.runtime.batching import build_plan
from aspire_sglang.runtime.draft_state import DraftState
from aspire_sglang.runtime.rank_check import RankCheck, RanksDisagree
from aspire_sglang.runtime.ranks import Ranks
from aspire_sglang.runtime.sampler import Accepted
from aspire_sglang.speculation.acceptance import make_estimator
from tests.two_ranks import SIZE, on_two_ranks

HEADS, KV_HEADS, DIM, LENGTH = 8, 4, 16, 300
REDUCTIONS = ("max", "mean", "sum")


def drafts_and_plan(token: int = 7):
    """Slot 1 drafts its second token, slot 2 verifies one draft."""
    state = DraftState(4, 4, "cpu", lambda: make_estimator("beta"))
    states = [state.get(slot, 1) for slot in (1, 2)]
    state.add_draft(1, states[0], 5)
    state.add_draft(2, states[1], 6)
    plan = build_plan(
        slots=[1, 2],
        seq_lens=[10, 20],
        pending=[1, 1],
        verify=[False, True],
        bonus=torch.tensor([3, 4]),
        draft_tokens=state.tokens,
        req_to_token=torch.arange(160, dtype=torch.int32).view(4, 40),
    )
    state.add_draft(1, states[0], token)
    return state, states, plan


def sparse_context(reduction: str) -> SparseContext:
    return SparseContext(
        SelectionConfig(4, 8, 0.0, 1, 2, reduction),  # type: ignore[arg-type]
        RefreshConfig("refresh", layer=1, same_step=True),
        num_layers=3,
        num_slots=4,
        context_len=LENGTH,
    )


def page_lists(ranks: Ranks, reduction: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Lists that a prefill and a mixed step leave behind, with this rank's share of the heads."""
    torch.manual_seed(3)
    keys, values = (torch.randn(KV_HEADS, 4 * LENGTH, DIM) for _ in range(2))
    queries = 2 * torch.randn(2, 2 * LENGTH, HEADS, DIM)
    q = queries.chunk(ranks.size, dim=2)[ranks.rank]
    k, v = (x.chunk(ranks.size)[ranks.rank].contiguous() for x in (keys, values))
    pool = SimpleNamespace(start_layer=0, head_major=lambda layer: (k, v))
    attention = CpuMixedAttention(
        num_heads=q.shape[2],
        req_to_token=torch.arange(4 * LENGTH, dtype=torch.int32).view(4, LENGTH),
        pool=pool,
        ranks=ranks,
    )
    attention.context = sparse_context(reduction)
    layer = SimpleNamespace(layer_id=1, scaling=0.25, logit_cap=0.0)
    attention.plan(ForwardRows([1, 2], [200, 220], [200, 220], [False, False]))
    attention.attend(layer, q[0, :420].contiguous(), torch.empty(420, *q.shape[2:]))
    prefill = attention.context.lists.pages.clone()
    attention.plan(ForwardRows([1, 2], [1, 3], [202, 223], [True, False], decoding=True))
    attention.attend(layer, q[1, :4].contiguous(), torch.empty(4, *q.shape[2:]))
    return prefill, attention.context.lists.pages


class Messages:
    """Counts what is sent between ranks."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        for name in ("all_reduce", "broadcast", "all_gather_into_tensor"):
            setattr(dist, name, self._counted(getattr(dist, name)))

    def _counted(self, send: Callable[..., Any]) -> Callable[..., Any]:
        def counted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            self.sizes.append(tensor.numel())
            return send(tensor, *args, **kwargs)

        return counted


def observe(ranks: Ranks) -> dict[str, Any]:
    """Everything that the tests look at, from one rank."""
    seen: dict[str, Any] = {"rank": ranks.rank, "size": ranks.size}
    sent = Messages()
    seen["slowest"] = ranks.slowest(1.0 + ranks.rank)
    seen["first"] = ranks.first(torch.tensor([10 + ranks.rank])).item()
    seen["from_first"] = ranks.from_first(lambda: {"rank": ranks.rank})

    def fail() -> None:
        raise ValueError(f"rank {ranks.rank}")

    try:
        ranks.from_first(fail)
    except ValueError as fault:
        seen["fault"] = str(fault)
    for reduction in REDUCTIONS:
        scores = torch.tensor([0.25, 0.5]) if ranks.rank == 0 else torch.tensor([0.5, 0.125])
        seen[f"votes {reduction}"] = ranks.votes(scores, reduction).tolist()
        sent.sizes.clear()
        seen[f"lists {reduction}"] = page_lists(ranks, reduction)
        seen[f"messages {reduction}"] = list(sent.sizes)

    # The ranks measured, drafted and accepted differently: the first one's outcome holds.
    state, states, plan = drafts_and_plan(token=7 + ranks.rank)
    states[0].confidence = [0.9, 0.5 + 0.1 * ranks.rank]
    accepted = Accepted(torch.tensor([[6, 8 + ranks.rank, 0, 0, 0]]), [2 - ranks.rank])
    sent.sizes.clear()
    outcome, seconds = agree_on_outcome(ranks, plan, state, states, accepted, 1.0 + ranks.rank)
    seen["messages"] = list(sent.sizes)
    seen["outcome"] = (
        outcome.tokens.tolist(),
        outcome.accept_lens,
        state.tokens[1, :2].tolist(),
        states[0].confidence,
        seconds,
    )

    check = RankCheck(ranks)
    lists = sparse_context("max").lists
    _, _, plan = drafts_and_plan()
    check.compare(plan, lists, (1.0, 2.0))
    seen["steps"] = check.steps
    seen["disagreements"] = []
    # What a rank does with pages beyond the end of a list is its own affair.
    lists.pages[1, lists.counts[1] :] = ranks.rank
    check.compare(plan, lists, (1.0, 2.0))
    for spoil in ("page lists", "step costs", "tokens", "modes"):
        if ranks.rank == 1:
            if spoil == "page lists":
                lists.counts[2] = 3
            elif spoil == "tokens":
                plan.input_ids[0] += 1
            elif spoil == "modes":
                plan.verify[0] = True
        costs = (1.0, 2.0 + (ranks.rank if spoil == "step costs" else 0.0))
        try:
            check.compare(plan, lists, costs)
        except RanksDisagree as fault:
            seen["disagreements"].append(str(fault))
        lists.counts[2] = 0
    return seen


@pytest.fixture(scope="module")
def seen() -> list[dict[str, Any]]:
    """What each of two ranks saw."""
    return on_two_ranks(observe)


def test_numbers_are_shared(seen):
    for rank, one in enumerate(seen):
        assert (one["rank"], one["size"]) == (rank, SIZE)
        assert one["slowest"] == 2.0
        assert one["first"] == 10
        assert one["from_first"] == {"rank": 0}
        assert one["fault"] == "rank 0"


def test_all_heads_vote(seen):
    for one in seen:
        assert one["votes max"] == [0.5, 0.5]
        assert one["votes sum"] == one["votes mean"] == [0.75, 0.625]


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_page_lists_are_those_of_one_rank_with_all_heads(seen, reduction):
    alone = page_lists(Ranks(), reduction)
    assert not torch.equal(alone[0], alone[1])
    for one in seen:
        for found, wanted in zip(one[f"lists {reduction}"], alone, strict=True):
            assert torch.equal(found, wanted)


def test_the_outcome_is_the_first_ranks(seen):
    for one in seen:
        assert one["outcome"] == ([[6, 8, 0, 0, 0]], [2], [5, 7], [0.9, 0.5], 1.0)


def test_a_step_takes_two_messages(seen):
    """One for all votes, of a number per key of a voting query, and one for the outcome."""
    for one in seen:
        for reduction in REDUCTIONS:
            prefill, decode = one[f"messages {reduction}"]
            assert 2 * 220 <= prefill < 2 * 240
            assert 3 * 223 <= decode < 3 * 240
        # Seconds, a confidence, a draft, an accept length and a run of five.
        assert one["messages"] == [1 + 1 + 1 + 1 + 5]


def test_a_rank_alone_keeps_its_own_outcome():
    state, states, plan = drafts_and_plan()
    accepted = Accepted(torch.tensor([[6, 8, 0, 0, 0]]), [2])
    outcome, seconds = agree_on_outcome(Ranks(), plan, state, states, accepted, 0.5)
    assert outcome is accepted
    assert seconds == 0.5
    assert math.isclose(Ranks().slowest(0.1), 0.1)


def test_the_check_names_what_differs(seen):
    for one in seen:
        assert one["steps"] == 1
        named = [
            message.split(" about the ")[1].split(" of ")[0] for message in one["disagreements"]
        ]
        assert named == ["page lists", "step costs", "tokens", "modes"]
        assert all("rank 1 differs from rank 0" in message for message in one["disagreements"])
