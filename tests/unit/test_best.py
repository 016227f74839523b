"""Best tokens and their probabilities against PyTorch's."""

from __future__ import annotations

import pytest
import torch

from aspire_sglang.sampling.best import best_tokens


@pytest.mark.parametrize("rows", [0, 1, 5])
@pytest.mark.parametrize("width", [1, 7, 16, 49_152, 1003])
@pytest.mark.parametrize("scale", [0.1, 1.0, 30.0])
def test_as_pytorch(rows: int, width: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(width)
    logits = scale * torch.randn(rows, width, generator=generator)
    tokens, probabilities = best_tokens(logits)
    assert torch.equal(tokens, logits.argmax(-1))
    torch.testing.assert_close(
        probabilities.double(), logits.double().softmax(-1).amax(-1), atol=0, rtol=1e-5
    )


def test_the_first_of_equals_and_forbidden_tokens() -> None:
    logits = torch.full((2, 100), float("-inf"))
    logits[0, [17, 41, 99]] = 2.0
    logits[1, 99] = -3.0
    tokens, probabilities = best_tokens(logits)
    assert tokens.tolist() == [17, 99]
    torch.testing.assert_close(probabilities, torch.tensor([1 / 3, 1.0]))


def test_rows_of_a_larger_matrix() -> None:
    logits = torch.randn(4, 50).T[:30, 1:3]
    assert torch.equal(best_tokens(logits)[0], logits.argmax(-1))


def test_nothing_but_nan() -> None:
    # A draft need not be good, but it must be a token.
    assert best_tokens(torch.full((1, 40), float("nan")))[0].tolist()[0] in range(40)
