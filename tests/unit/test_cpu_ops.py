"""The CPU platform's operators against SGLang's reference versions."""

from types import SimpleNamespace

import pytest
import torch


@pytest.fixture(scope="module")
def ops():
    # SGLang's layers look at the platform while they are imported, which takes seconds: do it once.
    from aspire_sglang.cpu_platform import ops

    return ops


@pytest.mark.parametrize("tokens", [0, 1, 7, 130])
@pytest.mark.parametrize("with_residual", [False, True])
def test_rms_norm(ops, tokens, with_residual):
    from sglang.srt.layers.layernorm import RMSNorm

    torch.manual_seed(0)
    op = RMSNorm(576, eps=1e-5)
    op.weight.data.normal_()
    x = torch.randn(tokens, 576)
    residual = torch.randn(tokens, 576) if with_residual else None
    expected = op.forward_native(x.clone(), None if residual is None else residual.clone())
    found = ops.rms_norm(op, x, residual)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("tokens", [1, 5, 64])
@pytest.mark.parametrize("strided", [False, True])
def test_rotary_embedding(ops, tokens, strided):
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
    from sglang.srt.layers.rotary_embedding.utils import apply_rotary_emb

    torch.manual_seed(1)
    # The constructor wants a running server's arguments; the computation needs only these.
    angles = torch.outer(torch.arange(8192.0), 100000.0 ** (-torch.arange(0, 64, 2) / 64))
    op = RotaryEmbedding.__new__(RotaryEmbedding)
    torch.nn.Module.__init__(op)
    op.head_size = op.rotary_dim = 64
    op.is_neox_style = True
    op.cos_sin_cache = torch.cat((angles.cos(), angles.sin()), dim=-1)
    op._apply_rotary_emb_wrapped = apply_rotary_emb
    qkv = torch.randn(tokens, 960)
    q, k = (
        (qkv[:, :576], qkv[:, 576:768])
        if strided
        else (qkv[:, :576].clone(), qkv[:, 576:768].clone())
    )
    positions = torch.randint(0, 8192, (tokens,))
    expected = op.forward_native(positions, q.clone(), k.clone())
    for _ in range(2):  # the second call finds the factors of the first
        found = ops.rotary_embedding(op, positions, q, k)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    positions.copy_((positions + 1) % 8192)
    expected = op.forward_native(positions, q.clone(), k.clone())
    found = ops.rotary_embedding(op, positions, q, k)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_other_rotary_styles_use_the_reference(ops):
    calls = []
    op = SimpleNamespace(
        is_neox_style=False,
        rotary_dim=64,
        head_size=64,
        forward_native=lambda *args: calls.append(args) or ("q", "k"),
    )
    x = torch.zeros(1, 64)
    assert ops.rotary_embedding(op, torch.zeros(1), x, x) == ("q", "k")
    assert len(calls) == 1
