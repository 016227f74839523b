"""What a user sees when a server cannot start: one line per fault, and no traceback."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from aspire_sglang.cli.server import aspire_args, free_port, plain_args

FAULTS = {
    "of the arguments": (
        ("--tp-size=2", "--enable-mixed-chunk"),
        "{gama_max: 8, context: {ratio: 2}}",
    ),
    "of the model": ((), "{context: {refresh_layer: 30}}"),
}


@pytest.fixture(scope="module")
def ended(model) -> dict[str, subprocess.CompletedProcess[str]]:
    """Starts that fail, at once: each imports for as long as it would alone."""

    def launch(kind: str) -> subprocess.CompletedProcess[str]:
        extra, config = FAULTS[kind]
        args = aspire_args(plain_args(model, extra=(*extra, f"--port={free_port()}")))
        command = [sys.executable, "-m", "sglang.launch_server", *args, "--aspire-config", config]
        return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)

    with ThreadPoolExecutor(len(FAULTS)) as pool:
        return dict(zip(FAULTS, pool.map(launch, FAULTS), strict=True))


def test_all_faults_of_a_start_are_told_at_once(ended):
    done = ended["of the arguments"]
    assert done.returncode == 2
    lines = [line for line in done.stderr.splitlines() if line.startswith("aspire-sglang: ")]
    assert len(lines) == 4
    for part in ("gama_max", "context.ratio", "--tp-size 2", "--enable-mixed-chunk"):
        assert any(part in line for line in lines), part
    assert "Traceback" not in done.stdout + done.stderr


def test_a_fault_that_the_model_makes_is_one_line(ended):
    done = ended["of the model"]
    assert done.returncode == 2
    last = done.stderr.strip().splitlines()[-1]
    assert last == "aspire-sglang: context.refresh_layer 30: the model has layers 0 to 29."
    assert "Traceback" not in done.stdout + done.stderr
