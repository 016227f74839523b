"""Page scores and page log-sum-exp in Triton's interpreter, against float64."""

import pytest
import torch

from aspire_sglang.kernels.page_scores import page_scores
from aspire_sglang.kernels.vote_rows import KeyScan, VoteRows
from tests.kernels import cases

SHAPES = pytest.mark.parametrize("shape", cases.VOTE_SHAPES.values(), ids=cases.VOTE_SHAPES)


@SHAPES
@pytest.mark.parametrize("reduction", ["max", "mean", "sum"])
def test_page_scores(shape, reduction):
    cases.check_page_scores(shape, torch.float16, "cpu", reduction)


def test_page_scores_float32():
    cases.check_page_scores(cases.VoteShape((50, 200)), torch.float32, "cpu", "max")


@pytest.mark.parametrize("programs", [1, 4, 1000])
def test_page_scores_do_not_depend_on_the_split(programs):
    scan = KeyScan(block=64, programs=programs)
    cases.check_page_scores(cases.VoteShape((700, 64, 65)), torch.float16, "cpu", "max", scan)


@SHAPES
@pytest.mark.parametrize("per_head", [True, False])
def test_page_lse(shape, per_head):
    cases.check_page_lse(shape, torch.float16, "cpu", per_head, normalized=not per_head)


def test_page_lse_is_exact_where_probabilities_underflow():
    cases.check_page_lse(cases.VoteShape((333, 90)), torch.float32, "cpu", True, normalized=True)


def test_page_masses_of_a_query_add_up_to_its_log_sum_exp():
    from aspire_sglang.kernels import reference
    from aspire_sglang.kernels.page_lse import page_lse

    case = cases.votes(cases.VoteShape((333,)), torch.float16, "cpu")
    out = torch.empty(1, 2, case.q.shape[1], 21)
    page_lse(case.q, case.k, case.req_to_token, case.rows, out, page_size=16, scale=case.scale)
    whole = reference.query_lse(case.q, case.k, case.req_to_token, case.rows, case.scale)
    torch.testing.assert_close(out[0, 0].logsumexp(-1), whole[0], rtol=1e-5, atol=1e-5)


def test_wrong_arguments_are_named():
    case = cases.votes(cases.VoteShape((20,)), torch.float16, "cpu")
    lse = torch.zeros(case.q.shape[:2])
    out = torch.empty(1, 4)

    def score(**changed):
        arguments = {
            "q": case.q, "lse": lse, "k": case.k, "req_to_token": case.req_to_token,
            "rows": case.rows, "out": out, "page_size": 16, "scale": 1.0, **changed,
        }  # fmt: skip
        page_scores(**arguments)

    for message, changed in {
        "evenly": {"q": case.q[:, :5]},
        "head dimension": {"q": case.q[..., :48], "k": case.k[..., :48]},
        "float16": {"k": case.k.float()},
        "lse": {"lse": lse.double()},
        "req_to_token": {"req_to_token": case.req_to_token.long()},
        "page_size": {"page_size": 12},
        "out": {"out": out.double()},
        "reduction": {"reduction": "median"},
    }.items():
        with pytest.raises(ValueError, match=message):
            score(**changed)
    with pytest.raises(ValueError, match="voters"):
        VoteRows(case.rows.slots, case.rows.voters[:, :1], case.rows.positions)
