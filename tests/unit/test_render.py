"""The report: kinds of result files, their tables, and the pages made of them."""

import json

import pytest

from bench.paths import ROOT
from bench.render import main
from bench.render_tables import READERS, kind_of

RESULTS = ROOT / "bench" / "results"


def read(name: str):
    return json.loads((RESULTS / name).read_text())


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("cpu-speed.json", "speed_up"),
        ("h200-engine.json", "speed_up"),
        ("cpu-ablation.json", "ablation"),
        ("cpu-demo.json", "demo"),
        ("h200-schedules.json", "gpu_ablation"),
        ("h200-ablation.json", None),
        ("h200-contexts.json", "contexts"),
        ("h200-kernels.json", None),
    ],
)
def test_kinds_are_told_apart(name, kind):
    assert kind_of(read(name)) == kind


def test_speed_up_is_the_ratio_of_medians():
    rates = {"plain": [10.0, 12.0, 11.0], "ASPIRE": [22.0, 20.0, 40.0]}
    case = {"requests": 8, "prompt_tokens": 6000, "tokens_per_s": rates}
    frame = READERS["speed_up"]({"cases": {"long": case}})
    assert frame["load"].tolist() == ["long: 8 x 6000"]
    assert frame[["ratio", "lowest", "highest"]].values.tolist() == [[2.0, 20 / 12, 4.0]]


def test_an_ablation_shows_the_best_cell_of_a_sweep():
    def cell(name, gamma, rates):
        settings = {"scheduler": {"gamma": gamma}}
        return {
            "name": name,
            "settings": settings,
            "tokens_per_s": rates,
            "accepted_share": [0.5],
        }

    cells = [
        cell("plain", None, [10.0]),
        cell("a", 4, [12.0, 11.0, 13.0]),
        cell("a", 8, [15.0, 9.0, 20.0]),
    ]
    frame = READERS["ablation"]({"results": cells}).set_index("schedule and context")
    assert frame.loc["a", ["gamma", "tokens/s", "ratio"]].tolist() == ["8", 15.0, 1.5]


def test_a_gpu_ablation_compares_with_stock_by_the_clock():
    frame = READERS["gpu_ablation"](read("h200-schedules.json"))
    keys = ["requests", "sampling", "context and schedule"]
    frame = frame.set_index(keys).sort_index()
    lines = frame.loc[("all at once", "temperature 0.7")]
    assert lines.loc["stock", "ratio"] == 1.0
    rule, stock = lines.loc["refresh, the paper's rule"], lines.loc["stock"]
    assert rule["ratio"] == rule["tokens/s"] / stock["tokens/s"]
    assert rule["lowest"] <= rule["tokens/s"] <= rule["highest"]
    assert lines.loc["refresh, staggered", "setting"] == "3"
    assert lines.loc["refresh, constant cost", "setting"] == "0.4"
    assert rule["ms per token, p50"] < rule["ms per token, p99"]
    waves = frame.loc[("one after another", "temperature 0.0")]
    assert set(waves.index) >= {"stock", "refresh, the paper's rule"}


def test_a_report_holds_every_result_and_its_pictures(tmp_path, capsys):
    cell = {"accept_length": 3.5, "standard_error": 0.25, "rate": 0.9, "verifies": 7}
    study = {"results": {"window": cell, "hybrid": {**cell, "accept_length": 123.0}}}
    (tmp_path / "study.json").write_text(json.dumps({"commit": "<abc>", **study}))
    (tmp_path / "other.json").write_text("[]")
    demo = {"server_flags": {}, "requests": read("cpu-demo.json")["requests"][:2]}
    (tmp_path / "a-demo.json").write_text(json.dumps(demo))
    out = tmp_path / "report"
    assert main([str(tmp_path), "--out", str(out)]) == 0
    assert "other.json" in capsys.readouterr().err
    text, page = (out / "report.md").read_text(), (out / "report.html").read_text()
    assert "| hybrid" in text
    assert "123" in text
    for picture in ("study-0.png", "a-demo-timeline.png"):
        assert picture in text
        assert (out / picture).stat().st_size > 1000
    assert page.count("data:image/png;base64,") == 2
    assert "&lt;abc&gt;" in page


def test_nothing_to_show_is_an_error(tmp_path):
    assert main([str(tmp_path), "--out", str(tmp_path / "report")]) == 1
