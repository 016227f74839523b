"""Penalties, bias and custom processors on the rows of a mixed step, with SGLang's own objects."""

from __future__ import annotations

from array import array
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor
from sglang.srt.sampling.penaltylib import (
    BatchedFrequencyPenalizer,
    BatchedMinNewTokensPenalizer,
    BatchedPenalizerOrchestrator,
    BatchedPresencePenalizer,
)
from sglang.srt.sampling.sampling_params import SamplingParams

from aspire_sglang.runtime import logit_rules
from aspire_sglang.runtime.batching import build_plan
from aspire_sglang.runtime.logit_rules import (
    apply_logit_rules,
    drop_penalizers,
    restore_penalties,
)
from aspire_sglang.sampling.grammar import apply_packed_mask

VOCAB = 20


class NoRepeat(CustomLogitProcessor):
    """Forbids the last token of the text."""

    def __call__(self, logits, custom_param_list=None):
        for row, params in enumerate(custom_param_list):
            text = params["__req__"].output_ids
            logits[row, text[-1]] = -torch.inf
            params["calls"].append(list(text))
        return logits


def make_req(output, **params):
    tokenizer = SimpleNamespace(eos_token_id=1, additional_stop_token_ids=None)
    req = SimpleNamespace(
        output_ids=array("q", output),
        sampling_params=SamplingParams(**params),
        tokenizer=tokenizer,
        custom_logit_processor=None,
        grammar=None,
    )
    return req


def make_info(reqs, processed=()):
    bias = None
    if any(req.sampling_params.logit_bias for req in reqs):
        bias = torch.zeros(len(reqs), VOCAB)
        for row, req in enumerate(reqs):
            for token, value in (req.sampling_params.logit_bias or {}).items():
                bias[row, int(token)] = value
    mask = torch.tensor([row in processed for row in range(len(reqs))])
    for row in processed:
        reqs[row].custom_logit_processor = "no repeat"
    return SimpleNamespace(
        vocab_size=VOCAB,
        logit_bias=bias,
        has_custom_logit_processor=bool(processed),
        custom_logit_processor={1: (NoRepeat(), mask)} if processed else None,
        custom_params=[{"__req__": req, "calls": []} for req in reqs],
        acc_additive_penalties=None,
        acc_scaling_penalties=None,
    )


def make_plan(pending, verify, drafts):
    n = len(pending)
    return build_plan(
        slots=list(range(1, n + 1)),
        seq_lens=[10] * n,
        pending=pending,
        verify=verify,
        bonus=torch.zeros(n, dtype=torch.int64),
        draft_tokens=drafts,
        req_to_token=torch.zeros(n + 1, 40, dtype=torch.int32),
    )


DRAFTS = torch.tensor([[0, 0, 0], [5, 6, 7], [8, 8, 9], [3, 4, 3]])


def test_rows_see_their_own_request_and_depth():
    """Rows in the plan's order: the draft row of request 1, then verify rows of 0 and 2."""
    reqs = [
        make_req([5], presence_penalty=1.0),
        make_req([9, 9], frequency_penalty=0.5),
        make_req([2]),
    ]
    plan = make_plan([1, 2, 3], [True, False, True], DRAFTS)
    logits = torch.zeros(1 + 2 + 4, VOCAB)
    apply_logit_rules(plan, reqs, DRAFTS, logits, make_info(reqs))
    # Request 1 drafts after 9 9 8 8; request 0 verifies after 5 and after 5 5.
    assert {int(t): float(logits[0, t]) for t in logits[0].nonzero()} == {8: -1.0, 9: -1.0}
    assert [row.nonzero().view(-1).tolist() for row in logits[1:3]] == [[5], [5]]
    assert not logits[3:].any(), "a plain request must not change"


def test_bias_reaches_every_position():
    reqs = [make_req([5], logit_bias={"7": -100.0, "2": 4.0}), make_req([6])]
    plan = make_plan([2, 1], [True, True], DRAFTS)
    logits = torch.zeros(5, VOCAB)
    apply_logit_rules(plan, reqs, DRAFTS, logits, make_info(reqs))
    assert (logits[:3, 7] == -100).all()
    assert (logits[:3, 2] == 4).all()
    assert not logits[3:].any()


def test_min_new_tokens_counts_tokens():
    reqs = [make_req([5, 6], min_new_tokens=4, stop_token_ids=[11])]
    plan = make_plan([3], [True], DRAFTS)
    logits = torch.zeros(4, VOCAB)
    apply_logit_rules(plan, reqs, DRAFTS, logits, make_info(reqs))
    forbidden = torch.isinf(logits)
    # Tokens 3 and 4 may not stop the text, token 5 may; 1 is the end of text.
    assert forbidden.nonzero().tolist() == [[0, 1], [0, 11], [1, 1], [1, 11]]


def test_custom_processors_see_the_text_of_each_position():
    reqs = [make_req([5]), make_req([9]), make_req([2])]
    plan = make_plan([1, 2, 3], [True, False, True], DRAFTS)
    info = make_info(reqs, processed=(1, 2))
    logits = torch.zeros(7, VOCAB)
    apply_logit_rules(plan, reqs, DRAFTS, logits, info)
    assert [params["calls"] for params in info.custom_params] == [
        [],
        [[9, 8, 8]],
        [[2], [2, 3], [2, 3, 4], [2, 3, 4, 3]],
    ]
    assert torch.isinf(logits).nonzero().tolist() == [[0, 8], [3, 2], [4, 3], [5, 4], [6, 3]]
    assert [list(req.output_ids) for req in reqs] == [[5], [9], [2]], "the output is put back"


class OnlyEven:
    """A grammar of even tokens after odd ones and the reverse, as a list of what was accepted."""

    finished = False

    def __init__(self, text):
        self.text = text

    def accept_token(self, token):
        assert token % 2 != self.text[-1] % 2
        self.text.append(token)

    def rollback(self, count):
        del self.text[-count:]

    def is_terminated(self):
        return False

    def allocate_vocab_mask(self, vocab_size, batch_size, device):
        return torch.full((batch_size, 1), -1, dtype=torch.int32, device=device)

    def fill_vocab_mask(self, mask, row):
        bits = range(self.text[-1] % 2 == 0, VOCAB, 2)
        mask[row, 0] = sum(1 << bit for bit in bits)

    def move_vocab_mask(self, mask, device):
        return mask

    def apply_vocab_mask(self, logits, vocab_mask):
        apply_packed_mask(logits, vocab_mask)


def test_the_order_is_penalty_mask_bias_processor():
    """A bias cannot lift a mask, and a grammar's positions are those of the drafts."""
    reqs = [make_req([4], logit_bias={"6": 50.0, "7": 50.0}), make_req([5])]
    reqs[0].grammar = OnlyEven([4])
    drafts = torch.tensor([[0, 0, 0], [5, 6, 7], [0, 0, 0]])
    plan = make_plan([2, 0], [True, True], drafts)
    logits = torch.zeros(4, VOCAB)
    apply_logit_rules(plan, reqs, drafts, logits, make_info(reqs))
    # After 4 an odd token, after 4 5 an even one, after 4 5 6 an odd one.
    assert logits.argmax(dim=1).tolist() == [7, 6, 7, 0]
    assert [torch.isinf(row).sum().item() for row in logits] == [10, 10, 10, 0]
    assert reqs[0].grammar.text == [4]


def test_a_row_without_any_allowed_token_can_be_sampled():
    """Grammar and bias may contradict each other; the scheduler must survive it."""
    reqs = [make_req([4], logit_bias={str(token): -torch.inf for token in range(VOCAB)})]
    plan = make_plan([1], [True], DRAFTS)
    logits = torch.zeros(2, VOCAB)
    apply_logit_rules(plan, reqs, DRAFTS, logits, make_info(reqs))
    assert torch.softmax(logits, -1).isfinite().all()
    assert logits.argmax(dim=-1).tolist() == [0, 0], "plain decoding's choice"


def test_the_output_is_put_back_when_a_processor_fails():
    reqs = [make_req([2])]
    info = make_info(reqs, processed=(0,))
    info.custom_params[0].pop("calls")
    plan = make_plan([2], [True], DRAFTS)
    with pytest.raises(KeyError):
        apply_logit_rules(plan, reqs, DRAFTS, torch.zeros(3, VOCAB), info)
    assert list(reqs[0].output_ids) == [2]


def test_a_retracted_request_keeps_its_penalties():
    reqs = [make_req([]), make_req([4, 4], frequency_penalty=1.0, repetition_penalty=2.0)]
    info = make_info(reqs)
    info.acc_additive_penalties = torch.zeros(2, VOCAB)
    info.acc_scaling_penalties = torch.ones(2, VOCAB)
    restore_penalties(reqs, info)
    assert info.acc_additive_penalties.nonzero().tolist() == [[1, 4]]
    assert float(info.acc_additive_penalties[1, 4]) == -2.0
    assert (info.acc_scaling_penalties != 1).nonzero().tolist() == [[1, 4]]


def test_dropped_penalizers_survive_merge_and_filter(monkeypatch):
    """SGLang merges and filters the counters of a batch that has none."""
    args = SimpleNamespace(speculative_algorithm="ASPIRE")
    monkeypatch.setattr(logit_rules, "get_server_args", lambda: args)
    kinds = {BatchedFrequencyPenalizer, BatchedPresencePenalizer, BatchedMinNewTokensPenalizer}

    def batch(reqs):
        made = SimpleNamespace(reqs=reqs, device="cpu")
        kept.append(made)
        orchestrator = BatchedPenalizerOrchestrator(VOCAB, FakeBatch(made), kinds)
        made.sampling_info = SimpleNamespace(penalizer_orchestrator=orchestrator)
        return made

    class FakeBatch:
        """The orchestrator holds its batch weakly."""

        def __init__(self, made):
            self.__dict__ = made.__dict__
            kept.append(self)

    kept: list = []
    running = batch([make_req([3], frequency_penalty=1.0, min_new_tokens=4), make_req([4])])
    ours = running.sampling_info.penalizer_orchestrator
    assert ours.is_required
    drop_penalizers(lambda batch: pytest.fail("SGLang must not count"), running)
    assert not ours.is_required
    new = batch([make_req([7], presence_penalty=1.0)])
    ours.merge(new.sampling_info.penalizer_orchestrator)
    running.reqs += new.reqs
    ours.filter(torch.tensor([0, 2]))
    running.reqs = [running.reqs[0], running.reqs[2]]
    drop_penalizers(lambda batch: None, running)
    ours.filter(torch.tensor([1]))
    assert not ours.is_required
