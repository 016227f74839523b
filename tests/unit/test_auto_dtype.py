"""What ``--dtype auto`` means on a CPU."""

import pytest
import torch
from transformers import LlamaConfig

from aspire_sglang.cpu_platform.substitutes import checkpoint_dtype


@pytest.mark.parametrize(
    ("checkpoint", "flag", "expected"),
    [
        (torch.float32, "auto", torch.float32),
        (torch.float16, "auto", torch.float32),
        (torch.bfloat16, "auto", torch.bfloat16),
        (torch.float32, "float16", torch.float16),
        (torch.float32, "bfloat16", torch.bfloat16),
        (torch.bfloat16, "float32", torch.float32),
    ],
)
def test_auto_never_gives_float16(checkpoint, flag, expected) -> None:
    from sglang.srt.configs import model_config

    original = model_config._get_and_verify_dtype
    original = getattr(original, "__wrapped__", original)
    config = LlamaConfig(torch_dtype=checkpoint)
    assert checkpoint_dtype(original, config, flag) == expected
