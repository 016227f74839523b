"""What the CPU platform changes for several ranks: embeddings of a shard, cores, memory."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch

from aspire_sglang.cpu_platform import cores, parallel


def test_every_token_has_one_row():
    """Three ranks of a vocabulary of 90 tokens and 6 added ones, in shards of 32 and 2."""
    table = torch.arange(96.0)
    tokens = torch.arange(96).view(2, 48)
    total = torch.zeros(2, 48)
    for rank in range(3):
        first, last = 32 * rank, min(32 * rank + 32, 90)
        padding = 32 - (last - first)
        added = 90 + 2 * rank
        shard = torch.cat([table[first:last], torch.full((padding,), torch.nan)])
        shard = torch.cat([shard, table[added : added + 2]])
        rows, mask = parallel.masked_input_and_mask(tokens, first, last, padding, added, added + 2)
        total += shard[rows].masked_fill(mask, 0)
    assert torch.equal(total, tokens.float())


def test_groups_get_no_communicator_of_a_gpu():
    given = parallel.model_parallel_group(lambda *args, **kwargs: kwargs, [[0, 1]], group_name="tp")
    assert given.pop("group_name") == "tp"
    assert given
    assert not any(given.values())


def test_cores_as_bound(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.delenv(cores.ENV_BIND, raising=False)
    assert cores.cores_of_rank(tp_rank=1, tp_size=2) is None
    monkeypatch.setenv(cores.ENV_BIND, "0-2,7|3,4")
    assert cores.cores_of_rank(tp_rank=0, tp_size=2) == [0, 1, 2, 7]
    assert cores.cores_of_rank(tp_rank=1, tp_size=2) == [3, 4]


@pytest.mark.parametrize("binding", ["0-3", "0-3|4-9", "0-3|x", "0-3|"])
def test_bindings_that_cannot_be_honoured_are_refused(monkeypatch, binding):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setenv(cores.ENV_BIND, binding)
    with pytest.raises(ValueError, match=cores.ENV_BIND):
        cores.cores_of_rank(tp_rank=1, tp_size=2)


@pytest.fixture
def threads(monkeypatch) -> list[int]:
    taken: list[int] = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: taken[-1] if taken else 9)
    monkeypatch.setattr(torch, "set_num_threads", taken.append)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    return taken


@pytest.mark.parametrize(
    ("tp_size", "dp_size", "share"), [(1, 1, 9), (2, 1, 4), (2, 2, 2), (16, 1, 1)]
)
def test_threads_are_shared_out(monkeypatch, threads, tp_size, dp_size, share):
    import sglang.srt.runtime_context as context

    args = SimpleNamespace(tp_size=tp_size, dp_size=dp_size, nnodes=1)
    monkeypatch.setattr(context, "get_server_args", lambda: args)
    cores.use_cores(tp_size=tp_size, tp_rank=0, local_omp_cpuid=None)
    assert threads == [share]


def test_a_number_of_threads_given_by_the_user_holds(monkeypatch, threads):
    monkeypatch.setenv("OMP_NUM_THREADS", "9")
    cores.use_cores(tp_size=2, tp_rank=0, local_omp_cpuid=None)
    assert threads == []


def test_memory_is_shared_out(monkeypatch):
    import sglang.srt.runtime_context as context
    import sglang.srt.utils.common as common

    nodes = ["0-3", "4-7"]
    monkeypatch.setattr(common, "get_cpu_ids_by_node", lambda: nodes)
    for ranks, share in ((1, 12.0), (2, 12.0), (4, 6.0)):
        args = SimpleNamespace(tp_size=ranks, dp_size=1, nnodes=1)
        monkeypatch.setattr(context, "get_server_args", lambda args=args: args)
        # SGLang's own figure is that of a node, half of 24 GB.
        assert cores.available_memory(lambda *_, **__: 12.0, "cpu", 0) == share
        assert cores.available_memory(lambda *_, **__: 12.0, "cuda", 0) == 12.0
