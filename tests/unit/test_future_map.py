"""The relay between steps: what the worker keeps on the device is not copied again."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("sglang.srt.managers.overlap_utils")

import torch
from sglang.srt.managers.overlap_utils import RelayPayload

from aspire_sglang.runtime.future_map import AspireFutureMap
from aspire_sglang.runtime.plain_steps import PlainSteps
from aspire_sglang.runtime.spec_inputs import NextStepInput


def relay():
    shared = torch.arange(5) * 10
    worker = SimpleNamespace(share_tokens=lambda relay: relay.share_tokens(shared))
    pool = SimpleNamespace(req_to_token=torch.zeros((5, 8)))
    PlainSteps(worker, pool, 17)
    algorithm = SimpleNamespace(
        is_ngram=lambda: False, is_some=lambda: False, need_topk=lambda: False
    )
    return AspireFutureMap("cpu", algorithm, pool), shared


def test_tokens_are_in_the_workers_memory():
    made, shared = relay()
    made.stash(torch.tensor([1, 3]), RelayPayload(torch.tensor([7, 8])))
    assert shared.tolist() == [0, 7, 20, 8, 40]
    made.stash(torch.tensor([1, 3]), RelayPayload(None))
    assert shared.tolist() == [0, 7, 20, 8, 40]


def test_an_input_without_tokens_stays_without():
    made, _ = relay()
    for info in (
        None,
        NextStepInput(future_indices=torch.tensor([1])),
        NextStepInput(bonus_tokens=torch.tensor([3])),
    ):
        made._resolve_spec_extras(SimpleNamespace(spec_info=info))
    info = NextStepInput(bonus_tokens=torch.tensor([9]), future_indices=torch.tensor([2]))
    made._resolve_spec_extras(SimpleNamespace(spec_info=info))
    assert info.bonus_tokens.tolist() == [20]


def test_lengths_of_a_plain_step_are_not_published():
    made, _ = relay()
    slots = torch.tensor([1, 2])
    made.publish(slots, torch.tensor([5, 6]))
    made.skips_publish = True
    made.publish(slots, torch.tensor([50, 60]))
    assert made.new_seq_lens_buf[1:3].tolist() == [5, 6]
    made.publish(slots, torch.tensor([7, 8]))
    assert made.new_seq_lens_buf[1:3].tolist() == [7, 8]
