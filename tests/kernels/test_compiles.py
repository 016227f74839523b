"""Every kernel compiles for a Hopper GPU; the interpreter takes what the compiler refuses."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.kernels.conftest import VARIABLE

ROOT = Path(__file__).resolve().parents[2]


def test_every_kernel_compiles() -> None:
    sources = "".join(path.read_text() for path in sorted((ROOT / "kernels").glob("*.py")))
    kernels = set(re.findall(r"^    (_\w+)\[\(?.*\]\($", sources, re.MULTILINE))
    assert len(kernels) > 10
    env = {name: value for name, value in os.environ.items() if name != VARIABLE}
    command = [sys.executable, str(ROOT / "tests" / "kernels" / "compile_for_hopper.py")]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert kernels <= set(re.findall(r"^compiled: (\w+)", done.stdout, re.MULTILINE))
