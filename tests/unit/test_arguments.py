"""Faults at launch end with one sentence and a non-zero exit."""

import argparse
import json
import socket

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


def test_unknown_setting_on_the_command_line(capsys, monkeypatch):
    parser = argparse.ArgumentParser()
    arguments.add_cli_args(lambda parser: None, parser)
    with pytest.raises(SystemExit) as ended:
        parser.parse_args(["--aspire-config", "{gama_max: 1}"])
    assert ended.value.code == 2
    assert "did you mean 'gamma_max'" in capsys.readouterr().err


def test_valid_setting_reaches_the_worker_processes(monkeypatch):
    monkeypatch.setenv("ASPIRE_CONFIG", "")
    parser = argparse.ArgumentParser()
    arguments.add_cli_args(lambda parser: None, parser)
    parser.parse_args(["--aspire-config", "{gamma_max: 4}"])
    from aspire_sglang.config import load_config

    assert load_config().gamma_max == 4


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"device": "xpu"}, "--device xpu"),
        ({"tp_size": 2}, "--tp-size 2: tensor parallelism is supported on CPUs only"),
        ({"enable_torch_compile": True}, "--enable-torch-compile"),
        ({"disable_cuda_graph_padding": True}, "--disable-cuda-graph-padding"),
        ({"page_size": 32}, "--page-size 32"),
    ],
)
def test_what_a_gpu_does_not_support_is_named(monkeypatch, change, named):
    from aspire_sglang.runtime import algorithm

    monkeypatch.setenv("ASPIRE_CONFIG", "")
    given = {"device": "cuda", "page_size": 16}
    algorithm._refuse_unsupported_on_gpu(argparse.Namespace(**given))
    with pytest.raises(ValueError, match=f"^ASPIRE: {named}"):
        algorithm._refuse_unsupported_on_gpu(argparse.Namespace(**{**given, **change}))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"pp_size": 2}, "--pp-size 2"),
        ({"enable_lora": True}, "--enable-lora"),
        ({"enable_hierarchical_cache": True}, "--enable-hierarchical-cache"),
        ({"disaggregation_mode": "decode"}, "--disaggregation-mode decode"),
        ({"attention_backend": "triton"}, "needs --attention-backend aspire"),
        ({"page_size": 16}, "--page-size 16"),
    ],
)
def test_what_no_machine_supports_is_named(monkeypatch, change, named):
    from aspire_sglang.runtime import algorithm

    monkeypatch.setattr(algorithm.cpu_platform, "is_active", lambda: True)
    given = {
        "attention_backend": "aspire",
        "prefill_attention_backend": None,
        "decode_attention_backend": None,
        "page_size": 1,
        "speculative_eagle_topk": None,
        "speculative_num_steps": None,
        "speculative_num_draft_tokens": None,
    }
    algorithm._refuse_unsupported(argparse.Namespace(**given))
    with pytest.raises(ValueError, match=f"^ASPIRE: {named}"):
        algorithm._refuse_unsupported(argparse.Namespace(**{**given, **change}))
