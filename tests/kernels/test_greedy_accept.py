"""The accept kernel in Triton's interpreter, against the sequential rule and the torch one."""

import pytest
import torch

from aspire_sglang.kernels.greedy_accept import accept_greedy
from aspire_sglang.sampling.verification import verify_greedy
from tests.kernels import cases


@pytest.mark.parametrize("depth", [1, 3, 4, 8])
@pytest.mark.parametrize("seed", range(3))
def test_equals_the_sequential_rule(depth, seed):
    cases.check_accept_greedy(9, depth, "cpu", seed)


def test_equals_verify_greedy():
    rng = torch.Generator().manual_seed(3)
    rows, depth = 12, 5
    pending = torch.randint(0, depth + 1, (rows,), generator=rng)
    drafts = torch.randint(0, 2, (rows, depth), generator=rng)
    indptr = torch.nn.functional.pad((pending + 1).cumsum(0), (1, 0))
    target = torch.randint(0, 2, (int(indptr[-1]),), generator=rng)
    want = verify_greedy(target, drafts, pending, indptr)
    tokens = torch.empty(rows, depth + 1, dtype=torch.int64)
    accept_len = torch.empty(rows, dtype=torch.int32)
    seq_lens, bonus = torch.full((rows,), 100), torch.zeros(rows, dtype=torch.int64)
    accept_greedy(
        target, indptr, torch.arange(rows), torch.zeros(rows, dtype=torch.bool), drafts, pending,
        bonus, seq_lens, tokens, accept_len,
    )  # fmt: skip
    assert tokens.tolist() == want.tokens.tolist()
    assert accept_len.tolist() == want.accept_len.tolist()
    assert seq_lens.tolist() == (100 + want.accept_len).tolist()
    assert pending.tolist() == [0] * rows
