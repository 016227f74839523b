"""Faults at launch end with one sentence and a non-zero exit."""

import argparse
import json
import socket
from types import SimpleNamespace

import pytest

from aspire_sglang.runtime import arguments


def launch(**changes):
    given = {
        "speculative_algorithm": "aspire",
        "model_path": "org/model",
        "attention_backend": "aspire",
        "tp_size": 1,
        "context_length": None,
        "host": "127.0.0.1",
        "port": 0,
    }
    args = argparse.Namespace(**{**given, **changes})
    return arguments.from_cli_args(lambda cls, args: "started", object, args)


def refused(capsys, **changes) -> str:
    with pytest.raises(SystemExit) as ended:
        launch(**changes)
    assert ended.value.code == 2
    message = capsys.readouterr().err.strip()
    assert "\n" not in message
    return message


def test_good_arguments_pass():
    assert launch() == "started"


def test_missing_model(capsys):
    assert "/no/such/model" in refused(capsys, model_path="/no/such/model")


def test_context_longer_than_the_model(capsys, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 8192}))
    message = refused(capsys, model_path=str(tmp_path), context_length=9000)
    assert "9000" in message
    assert "8192" in message
    assert launch(model_path=str(tmp_path), context_length=8192) == "started"


def test_ranks_that_cannot_share_the_heads(capsys, tmp_path):
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3}
    (tmp_path / "config.json").write_text(json.dumps(heads))
    for algorithm in ("aspire", None):
        given = {"model_path": str(tmp_path), "speculative_algorithm": algorithm}
        message = refused(capsys, tp_size=2, **given)
        assert message.startswith("aspire-sglang: --tp-size 2: ")
        assert "9 query heads and 3 KV heads" in message
        assert message.endswith("choose 1 or 3.")
        assert launch(tp_size=3, **given) == "started"


def test_port_in_use(capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert str(port) in refused(capsys, port=port)


def test_other_servers_are_left_alone():
    others = {"speculative_algorithm": None, "attention_backend": "triton"}
    assert launch(**others, model_path="/no/such/model") == "started"


def test_unknown_settings_and_bad_flags_are_reported_together(capsys):
    with pytest.raises(SystemExit) as ended:
        launch(aspire_config="{gama_max: 1, context: {ratio: 3}}", pp_size=2, enable_lora=True)
    assert ended.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 4
    assert all(line.startswith("aspire-sglang: ") for line in lines)
    for part in ("did you mean 'gamma_max'", "context.ratio", "--pp-size 2", "--enable-lora"):
        assert any(part in line for line in lines)


def test_a_bad_file_stops_a_plain_server_too(capsys):
    assert "gama_max" in refused(
        capsys, speculative_algorithm=None, aspire_config="{gama_max: 1}", tp_size=2
    )


@pytest.mark.parametrize("fault", [ValueError, AssertionError, NotImplementedError])
def test_faults_that_sglang_finds_are_one_line_too(capsys, fault):
    def resolve(cls, args):
        raise fault("two\nlines")

    args = {"speculative_algorithm": "ASPIRE", "model_path": "m", "log_level": "info"}
    given = argparse.Namespace(**args, context_length=None, host=None, port=0)
    with pytest.raises(SystemExit):
        arguments.from_cli_args(resolve, object, given)
    assert capsys.readouterr().err == "aspire-sglang: two lines\n"
    # With a debug log, and for a server that does not speculate, the traceback stays.
    for change in ({"log_level": "debug"}, {"speculative_algorithm": None}):
        with pytest.raises(fault):
            arguments.from_cli_args(
                resolve, object, argparse.Namespace(**{**vars(given), **change})
            )


def test_a_misspelled_flag_is_one_line_with_the_nearest_name(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["serve", "--speculative-algorithm", "ASPIRE"])
    parser = argparse.ArgumentParser()
    parser.add_argument("--page-size", type=int)
    arguments.add_cli_args(lambda parser: None, parser)
    for given, named in (
        (["--aspire-konfig", "f"], "--aspire-config"),
        (["--page-size", "x"], "x"),
    ):
        with pytest.raises(SystemExit) as ended:
            parser.parse_args(given)
        assert ended.value.code == 2
        message = capsys.readouterr().err.strip()
        assert "\n" not in message
        assert named in message


def test_valid_setting_reaches_the_worker_processes(monkeypatch):
    monkeypatch.setenv("ASPIRE_CONFIG", "")
    parser = argparse.ArgumentParser()
    arguments.add_cli_args(lambda parser: None, parser)
    parser.parse_args(["--aspire-config", "{gamma_max: 4}"])
    from aspire_sglang.config import load_config

    assert load_config().gamma_max == 4


def server_args(**changes):
    given = {
        "attention_backend": "aspire",
        "device": "cuda",
        "page_size": 16,
        "speculative_num_steps": None,
        "get_model_config": lambda: SimpleNamespace(
            model_path="m", num_hidden_layers=30, hf_text_config=None
        ),
    }
    return argparse.Namespace(**{**given, **changes})


def graphs(backend):
    return SimpleNamespace(prefill=SimpleNamespace(backend=backend))


@pytest.fixture
def on_gpu(monkeypatch):
    from aspire_sglang.runtime import flag_checks

    monkeypatch.setattr(flag_checks, "model_faults", lambda config, on_cpu: [])
    monkeypatch.setenv("ASPIRE_CONFIG", "")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"device": "xpu"}, "--device xpu"),
        ({"tp_size": 2}, "--tp-size 2: tensor parallelism was never run on several GPUs"),
        ({"page_size": 32}, "--page-size 32"),
        ({"attention_backend": "triton"}, "needs --attention-backend aspire"),
        ({"attention_backend": None}, "needs --attention-backend aspire"),
        ({"prefill_attention_backend": "fa3"}, "needs --attention-backend aspire"),
        ({"speculative_eagle_topk": 2}, "--speculative-eagle-topk 2"),
        ({"speculative_num_steps": 65}, "--speculative-num-steps 65"),
        ({"speculative_num_steps": 4, "speculative_num_draft_tokens": 9}, "--speculative-num-dr"),
        ({"cuda_graph_backend_prefill": "full"}, "--cuda-graph-backend-prefill full: must be brea"),
        ({"cuda_graph_config": graphs("full")}, "--cuda-graph-config: prefill.backend full must"),
    ],
)
def test_an_engine_is_told_by_an_exception(on_gpu, change, named):
    from aspire_sglang.runtime import algorithm

    algorithm._checked_config(server_args(), on_cpu=False)
    with pytest.raises(ValueError, match=f"^ASPIRE: {named}"):
        algorithm._checked_config(server_args(**change), on_cpu=False)


@pytest.mark.parametrize("backend", ["breakable", "disabled"])
def test_graphs_of_a_prefill_that_leave_its_attention_out_stay(on_gpu, backend):
    from aspire_sglang.runtime import algorithm

    given = server_args(cuda_graph_backend_prefill=backend, cuda_graph_config=graphs(backend))
    algorithm._checked_config(given, on_cpu=False)


def test_graphs_that_would_record_a_vote_are_refused_once(on_gpu):
    from aspire_sglang.runtime import algorithm

    kind = "tc_piecewise"
    given = server_args(cuda_graph_backend_prefill=kind, cuda_graph_config=graphs(kind))
    with pytest.raises(ValueError, match="must be breakable or disabled") as refusal:
        algorithm._checked_config(given, on_cpu=False)
    assert len(refusal.value.faults) == 1


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ("{context: {page_size: 48}}", "context.page_size 48"),
        ("{context: {page_size: 8}}", "--page-size 16"),
        (
            "{context: {selection: delta}}",
            "context.selection delta: runs on a CPU only",
        ),
        (
            "{context: {refresh_layer: 30}}",
            "context.refresh_layer 30: the model has layers 0 to 29",
        ),
        ("{gama_max: 8}", "--aspire-config: unknown option"),
    ],
)
def test_settings_that_do_not_fit_are_found_at_start(on_gpu, monkeypatch, setting, named):
    from aspire_sglang.runtime import algorithm

    monkeypatch.setenv("ASPIRE_CONFIG", setting)
    with pytest.raises(ValueError, match=f"^ASPIRE: {named}"):
        algorithm._checked_config(server_args(), on_cpu=False)


@pytest.mark.parametrize(
    ("heads", "most"),
    [
        ((32, 8, 128), 15),
        ((40, 8, 128), 11),
        ((64, 8, 128), 7),
        ((16, 8, 128), 16),
        ((9, 3, 64), 16),
        ((32, 2, 128), 16),
    ],
)
def test_drafts_that_nobody_asked_for_fit_the_small_tile(heads, most):
    from aspire_sglang.runtime.algorithm import _fitting_gamma

    queries, keys, width = heads
    model = SimpleNamespace(num_attention_heads=queries, num_key_value_heads=keys, head_dim=width)
    assert _fitting_gamma(16, model) == most
    assert _fitting_gamma(5, model) == 5
