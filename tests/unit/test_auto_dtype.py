"""What ``--dtype auto`` means on a CPU."""

import pytest
import torch
from transformers import LlamaConfig

from aspire_sglang.cpu_platform import substitutes


@pytest.mark.parametrize("has_bfloat16", [False, True])
@pytest.mark.parametrize(
    ("checkpoint", "flag", "expected"),
    [
        (torch.float32, "auto", torch.float32),
        (torch.float16, "auto", torch.float32),
        (torch.bfloat16, "auto", None),
        (torch.float32, "float16", torch.float16),
        (torch.float32, "bfloat16", torch.bfloat16),
        (torch.bfloat16, "float32", torch.float32),
    ],
)
def test_auto_gives_what_the_processor_computes_fast(
    monkeypatch, has_bfloat16, checkpoint, flag, expected
) -> None:
    from sglang.srt.configs import model_config

    monkeypatch.setattr(
        substitutes, "_computes", lambda dtype: has_bfloat16 and dtype == torch.bfloat16
    )
    original = model_config._get_and_verify_dtype
    original = getattr(original, "__wrapped__", original)
    config = LlamaConfig(torch_dtype=checkpoint)
    if expected is None:
        expected = torch.bfloat16 if has_bfloat16 else torch.float32
    assert substitutes.checkpoint_dtype(original, config, flag) == expected
