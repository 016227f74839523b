"""What a user sees when a server cannot start: one line per fault, and no traceback."""

from __future__ import annotations

import subprocess
import sys

from aspire_sglang.cli.server import aspire_args, plain_args


def launch(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sglang.launch_server", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def test_all_faults_of_a_start_are_told_at_once(model):
    config = "{gama_max: 8, context: {ratio: 2}}"
    args = aspire_args(plain_args(model, extra=("--tp-size=2", "--enable-mixed-chunk")))
    done = launch(*args, "--aspire-config", config)
    assert done.returncode == 2
    lines = [line for line in done.stderr.splitlines() if line.startswith("aspire-sglang: ")]
    assert len(lines) == 4
    for part in ("gama_max", "context.ratio", "--tp-size 2", "--enable-mixed-chunk"):
        assert any(part in line for line in lines), part
    assert "Traceback" not in done.stdout + done.stderr


def test_a_fault_that_the_model_makes_is_one_line(model):
    args = aspire_args(plain_args(model))
    done = launch(*args, "--aspire-config", "{context: {refresh_layer: 30}}")
    assert done.returncode == 2
    last = done.stderr.strip().splitlines()[-1]
    assert last == "aspire-sglang: context.refresh_layer 30: the model has layers 0 to 29."
    assert "Traceback" not in done.stdout + done.stderr
