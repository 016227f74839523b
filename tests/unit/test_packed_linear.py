"""Packed linears equal plain ones, and their installation leaves SGLang's semantics alone."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from aspire_sglang.cpu_platform import packed_linear, panel_forms, panel_linear
from aspire_sglang.cpu_platform.onednn_linear import OneDnnLinear
from aspire_sglang.cpu_platform.packed_linear import (
    PackingReport,
    layouts,
    measure_packing,
    pack_model,
    repack,
)
from aspire_sglang.cpu_platform.panel_forms import BFLOAT, BLOCK, CODES, FLOAT, PANEL
from aspire_sglang.cpu_platform.panel_linear import _ROWS, _TILE, PanelLinear

# float32 sums of 96 terms in another order; bfloat16 outputs are rounded once (2^-9 relative).
TOL = {torch.float32: {"atol": 2e-5, "rtol": 1e-5}, torch.bfloat16: {"atol": 2e-2, "rtol": 1e-2}}
# What is not listed here is refused by the layout, which is a test of its own.
KINDS = [
    pytest.param(kind, dtype, id=f"{kind.__name__}-{str(dtype).removeprefix('torch.')}")
    for dtype in TOL
    for kind in layouts(dtype)
]
ALL = [layout for layout in (OneDnnLinear, PanelLinear) if layout.supports(torch.float32)]


@pytest.mark.parametrize(("kind", "dtype"), KINDS)
@pytest.mark.parametrize("lead", [(0,), (1,), (7,), (129,), (2, 3), (0, 4), ()])
@pytest.mark.parametrize("with_bias", [False, True])
def test_equals_linear(
    kind: type, dtype: torch.dtype, lead: tuple[int, ...], with_bias: bool
) -> None:
    weight = torch.randn(80, 96).to(dtype)
    bias = torch.randn(80).to(dtype) if with_bias else None
    x = torch.randn(*lead, 96).to(dtype)
    out = kind(weight)(x, bias)
    assert out.dtype == dtype
    torch.testing.assert_close(out, F.linear(x, weight, bias), **TOL[dtype])


@pytest.mark.parametrize("rows", [*range(1, 2 * _TILE + 2), _ROWS, _ROWS + 1, 2 * _ROWS + 5])
@pytest.mark.parametrize("columns", [1, PANEL - 1, PANEL, 3 * PANEL + 1])
@pytest.mark.parametrize("width", [1, 33])
def test_panels_of_every_shape(rows: int, columns: int, width: int) -> None:
    weight = torch.randn(columns, width)
    # Memory behind the inputs and outputs must not be read or written.
    x = torch.full((rows + 1, width), float("nan"))
    x[:rows] = torch.randn(rows, width)
    out = PanelLinear(weight)(x[:rows])
    assert out.shape == (rows, columns)
    torch.testing.assert_close(out, F.linear(x[:rows], weight), **TOL[torch.float32])


def coded(columns: int, width: int, codes: int) -> torch.Tensor:
    """Weights as they are unpacked from a file: a step and a lowest value of float16 per block."""
    blocks = columns, width // BLOCK, 1
    step, low = (torch.rand(blocks).mul(scale).half().float() for scale in (0.01, 0.1))
    code = torch.randint(0, codes, (columns, width // BLOCK, BLOCK))
    return (code * step - low).view(columns, width)


@pytest.mark.parametrize("rows", [1, 2, _TILE, 2 * _TILE + 1, _ROWS + 3])
@pytest.mark.parametrize("columns", [1, PANEL, 2 * PANEL + 5])
@pytest.mark.parametrize("width", [BLOCK, 3 * BLOCK, 5 * BLOCK])
@pytest.mark.parametrize("form", [CODES, BFLOAT])
def test_short_forms_change_no_bit(rows: int, columns: int, width: int, form: int, monkeypatch):
    weight = coded(columns, width, 16)
    if form == BFLOAT:
        weight = torch.randn(columns, width).bfloat16().float()
    short = PanelLinear(weight)
    assert short.form == form
    as_it_is = FLOAT, panel_forms._panels(weight)
    monkeypatch.setattr(panel_linear, "lay_out", lambda _: as_it_is)
    long = PanelLinear(weight)
    assert long.form == FLOAT
    x = torch.randn(rows, width)
    assert torch.equal(short(x), long(x))


@pytest.mark.parametrize("codes", [2, 16, 256])
def test_weights_of_small_codes_are_found(codes: int) -> None:
    weight = coded(7, 4 * BLOCK, codes)
    weight[0] = 0.0
    weight[1, :BLOCK] = weight[1, 0]
    found = torch.empty(7, 4 * BLOCK, dtype=torch.uint8), torch.empty(7, 4, 2)
    assert panel_forms.find_codes(weight.numpy(), *(each.numpy() for each in found))
    step, low = found[1].double().repeat_interleave(BLOCK, 1).unbind(2)
    assert torch.equal((found[0].double() * step + low).float(), weight)


@pytest.mark.parametrize("spoilt", [0.3, 1e-9, float("inf"), float("nan"), 1e30, 60000.0])
def test_one_weight_outside_keeps_all_as_they_are(spoilt: float) -> None:
    weight = coded(40, 2 * BLOCK, 16)
    weight[39, -1] = spoilt
    linear = PanelLinear(weight)
    assert linear.form == FLOAT
    x = torch.zeros(1, 2 * BLOCK)
    x[0, 5] = 1.0
    assert torch.equal(linear(x)[:, :39], weight[None, :39, 5])


def test_blocks_that_do_not_fill_the_width() -> None:
    assert PanelLinear(coded(8, 2 * BLOCK, 16)[:, :-1]).form == FLOAT


def test_panels_give_a_row_the_same_bits_in_any_batch() -> None:
    linear = PanelLinear(torch.randn(100, 300))
    x = torch.randn(40, 300)
    together = linear(x)
    for rows in (1, 3, 7, 17):
        assert torch.equal(linear(x[:rows]), together[:rows])


@pytest.mark.parametrize("kind", ALL)
def test_strided_input_and_a_poisoned_row(kind: type) -> None:
    weight = torch.randn(80, 96)
    wide = torch.randn(5, 2 * 96)
    x = wide[:, 96:]
    packed = kind(weight)
    torch.testing.assert_close(packed(x), F.linear(x, weight), **TOL[torch.float32])
    x = x.clone()
    x[2] = float("nan")
    bad = packed(x).isnan().any(1)
    assert bad.tolist() == [False, False, True, False, False]


@pytest.mark.parametrize("kind", ALL)
def test_errors(kind: type) -> None:
    with pytest.raises(ValueError, match="cannot"):
        kind(torch.zeros(4))
    with pytest.raises(ValueError, match="cannot"):
        kind(torch.zeros(4, 4, dtype=torch.float16))
    packed = kind(torch.zeros(4, 4))
    with pytest.raises(ValueError, match="input"):
        packed(torch.zeros(1, 5))
    with pytest.raises(ValueError, match="input"):
        packed(torch.zeros(1, 4, dtype=torch.bfloat16))


def test_measure() -> None:
    report = measure_packing(budget_s=0.05, shape=(64, 64))
    assert report.plain_us > 0
    assert set(report.packed_us) == set(layouts(torch.float32))
    assert all(0 < time < float("inf") for time in report.packed_us.values())
    assert "float32 linear of 8 rows: plain" in str(report)


def test_choice() -> None:
    def choice(plain: float, stack: bool = False, **packed: float) -> type | None:
        kinds = {"onednn": OneDnnLinear, "panels": PanelLinear}
        times = {kinds[name]: time for name, time in packed.items()}
        return PackingReport(torch.float32, 8, plain, times).choice(stack=stack)

    assert choice(100.0, onednn=60.0, panels=50.0) is PanelLinear
    assert choice(100.0, onednn=50.0, panels=60.0) is OneDnnLinear
    assert choice(100.0, onednn=91.0) is None
    assert choice(0.0) is None
    # A program of all layers makes up for slower linears, not for any.
    assert choice(100.0, stack=True, onednn=50.0, panels=74.0) is PanelLinear
    assert choice(100.0, stack=True, onednn=50.0, panels=76.0) is OneDnnLinear
    assert choice(100.0, stack=True, panels=134.0) is PanelLinear
    assert choice(100.0, stack=True, panels=136.0) is None
    assert choice(0.0, stack=True) is None


def test_without_any_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_linear, "layouts", lambda dtype: [])
    report = measure_packing()
    assert report.choice() is None
    assert "no layout" in str(report)


class Layer(nn.Module):
    """What SGLang's linears and embeddings look like to the code that calls them."""

    def __init__(self, method: object, out: int, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.quant_method = method
        self.weight = nn.Parameter(torch.randn(out, width).to(dtype), requires_grad=False)

    def forward(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return self.quant_method.apply(self, x, bias)  # type: ignore[attr-defined]


class Model(nn.Module):
    def __init__(self, kind: type, fp32_head: bool = False, tied: bool = True) -> None:
        super().__init__()
        from sglang.srt.layers.quantization import unquant

        linear, embedding = unquant.UnquantizedLinearMethod, unquant.UnquantizedEmbeddingMethod

        class Quantised(linear):  # type: ignore[misc, valid-type]
            pass

        self.up = Layer(linear(), 64, 32, torch.float32)
        # bfloat16 where the layout has it here.
        self.down = Layer(linear(), 32, 64, [dtype for dtype in TOL if kind.supports(dtype)][-1])
        self.fp16 = Layer(linear(), 32, 64, torch.float16)
        self.quantised = Layer(Quantised(), 32, 64, torch.float32)
        self.embed_tokens = Layer(embedding(), 50, 32, torch.float32)
        self.lm_head = self.embed_tokens if tied else Layer(embedding(), 50, 32, torch.float32)
        self.logits_processor = SimpleNamespace(
            use_fp32_lm_head=fp32_head, rl_on_policy_target=None
        )


def close(out: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(out, want, **TOL[out.dtype])


@pytest.mark.parametrize("kind", ALL)
def test_pack_model(kind: type) -> None:
    from sglang.srt.layers import logits_processor
    from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod

    model = Model(kind)
    untouched = (model.fp16.quant_method, model.quantised.quant_method)
    assert pack_model(model, kind) == 3
    assert pack_model(model, kind) == 3
    assert (model.fp16.quant_method, model.quantised.quant_method) == untouched
    assert isinstance(model.up.quant_method, UnquantizedLinearMethod)
    head = model.lm_head
    assert logits_processor.should_apply_lm_head_quant_method(head, head.quant_method)
    x = torch.randn(5, 32)
    close(model.up(x), F.linear(x, model.up.weight))
    close(head(x), F.linear(x, head.weight))
    ids = torch.tensor([3, 49])
    assert torch.equal(head.quant_method.embedding(head, ids), head.weight[ids])


@pytest.mark.parametrize("kind", ALL)
def test_weight_updates(kind: type) -> None:
    model = Model(kind, tied=False)
    assert pack_model(model, kind) == 3
    assert not hasattr(model.embed_tokens.quant_method, "aspire_repack")
    x = torch.randn(5, 32)
    model.up.weight.data.copy_(torch.randn(64, 32))
    assert repack(model) == 3
    close(model.up(x), F.linear(x, model.up.weight))
    model.up.weight.data.copy_(torch.randn(64, 32))
    model.up.quant_method.process_weights_after_loading(model.up)
    close(model.up(x), F.linear(x, model.up.weight))
    # A weight put in place of the packed one is used at once, packed or not.
    model.lm_head.weight = nn.Parameter(torch.randn(50, 32), requires_grad=False)
    close(model.lm_head(x), F.linear(x, model.lm_head.weight))


@pytest.mark.parametrize("kind", ALL)
def test_fp32_head_is_left_alone(kind: type) -> None:
    model = Model(kind, fp32_head=True)
    assert pack_model(model, kind) == 2
    assert not hasattr(model.lm_head.quant_method, "aspire_repack")
