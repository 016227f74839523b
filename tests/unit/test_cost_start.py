"""The step costs of a start: measured once, kept, read again, refused where they do not fit."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

pytest.importorskip("sglang.srt.model_executor.forward_batch_info")

from aspire_sglang.config import AspireConfig
from aspire_sglang.runtime import cost_start
from aspire_sglang.runtime.ranks import Ranks
from aspire_sglang.speculation.cost_model import StepShape

SAMPLES = [
    (StepShape(t, kv, t * kv), 1e-3 + 1e-5 * t + 1e-8 * kv)
    for t in (1, 16, 64)
    for kv in (100, 5000, 90_000)
]


def worker(config: AspireConfig, dtype: str = "float32", device: str = "cuda:0", tp_size: int = 1):
    return SimpleNamespace(
        config=config,
        ranks=Ranks(),
        gamma_max=16,
        model_runner=SimpleNamespace(
            server_args=SimpleNamespace(model_path="model", tp_size=tp_size),
            device=device,
            dtype=dtype,
            page_size=1,
            attn_backend=SimpleNamespace(context=SimpleNamespace(describe=lambda: "32 pages")),
        ),
    )


@pytest.fixture
def profiles(monkeypatch, tmp_path):
    monkeypatch.setenv("ASPIRE_CACHE", str(tmp_path))
    taken = []

    def measure(_):
        taken.append(1)
        return SAMPLES

    monkeypatch.setattr(cost_start, "profile_steps", measure)
    monkeypatch.setattr(cost_start, "_device", str)
    return taken


def test_measured_once(profiles, tmp_path):
    first = cost_start.start_up_cost(worker(AspireConfig()))
    again = cost_start.start_up_cost(worker(AspireConfig()))
    assert len(profiles) == 1
    assert first.model == again.model
    assert first.describe().startswith("profiled here")
    assert again.describe().startswith(f"read from {tmp_path}")


def test_a_cpu_is_measured_at_every_start_unless_a_file_is_named(profiles, tmp_path):
    for _ in range(2):
        cost_start.start_up_cost(worker(AspireConfig(), device="cpu"))
    assert len(profiles) == 2
    assert list(tmp_path.iterdir()) == []
    config = AspireConfig(cost_file=str(tmp_path / "mine.json"))
    for _ in range(2):
        cost_start.start_up_cost(worker(config, device="cpu"))
    assert len(profiles) == 3


def test_another_setting_has_a_fit_of_its_own(profiles):
    cost_start.start_up_cost(worker(AspireConfig()))
    cost_start.start_up_cost(worker(AspireConfig(), dtype="bfloat16"))
    assert len(profiles) == 2


def test_a_named_file_of_another_setting_is_refused_and_replaced(profiles, tmp_path, caplog):
    config = AspireConfig(cost_file=str(tmp_path / "mine.json"))
    cost_start.start_up_cost(worker(config))
    cost_start.start_up_cost(worker(config, dtype="bfloat16"))
    assert len(profiles) == 2
    assert "dtype: stored 'float32', wanted 'bfloat16'" in caplog.text
    assert json.loads((tmp_path / "mine.json").read_text())["key"]["dtype"] == "bfloat16"


def test_a_fit_of_one_rank_is_refused_for_two(profiles, tmp_path, caplog):
    config = AspireConfig(cost_file=str(tmp_path / "mine.json"))
    cost_start.start_up_cost(worker(config, device="cpu"))
    cost_start.start_up_cost(worker(config, device="cpu", tp_size=2))
    assert len(profiles) == 2
    assert "(tp_size: stored 1, wanted 2)" in caplog.text
    cost_start.start_up_cost(worker(config, device="cpu", tp_size=2))
    assert len(profiles) == 2


def test_a_broken_file_is_replaced(profiles, tmp_path, caplog):
    path = tmp_path / "mine.json"
    path.write_text("{")
    cost_start.start_up_cost(worker(AspireConfig(cost_file=str(path))))
    assert len(profiles) == 1
    assert "not a readable cost model" in caplog.text
    assert json.loads(path.read_text())


def test_a_folder_that_cannot_be_written_only_warns(profiles, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    config = AspireConfig(cost_file=str(tmp_path / "file" / "costs.json"))
    cost = cost_start.start_up_cost(worker(config))
    assert cost.fitted is not None
    assert "cannot be kept" in caplog.text


def test_no_profile_no_file(profiles):
    cost = cost_start.start_up_cost(worker(AspireConfig(cost_profile=False)))
    assert not profiles
    assert cost.fitted is None
