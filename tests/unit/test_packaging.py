"""What an installed package must and must not do to its environment."""

import subprocess
import sys
from importlib.metadata import entry_points, requires
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(code: str, cwd: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_root_kernels_folder_does_not_shadow_the_pypi_package():
    # SGLang's stack imports the PyPI package 'kernels'; a user may well start the server here.
    found = run("import kernels; print(kernels.__file__)", ROOT)
    assert "site-packages" in found


def test_our_kernels_import_under_the_package(tmp_path):
    found = run("import aspire_sglang.kernels as k; print(list(k.__path__)[0])", tmp_path)
    assert Path(found).resolve() == ROOT / "kernels"


def test_entry_points():
    plugins = {e.name: e.value for e in entry_points(group="sglang.srt.plugins")}
    platforms = {e.name: e.value for e in entry_points(group="sglang.srt.platforms")}
    assert plugins["aspire"] == "aspire_sglang.plugin:load"
    assert platforms["aspire_cpu"] == "aspire_sglang.cpu_platform:activate"


def test_sglang_is_pinned_to_a_supported_release():
    from aspire_sglang.compat import SUPPORTED_SGLANG

    pins = [r for r in requires("aspire-sglang") or [] if r.startswith("sglang==")]
    assert pins == [f"sglang=={SUPPORTED_SGLANG[-1]}"]


def test_importing_the_package_is_light(tmp_path):
    code = "import sys, aspire_sglang; print({'torch', 'sglang'} & set(sys.modules))"
    assert run(code, tmp_path) == "set()"


def test_algorithm_code_does_not_import_sglang(tmp_path):
    code = """
import importlib, pkgutil, sys
for area in ("speculation", "sampling", "context"):
    package = importlib.import_module(f"aspire_sglang.{area}")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"aspire_sglang.{area}.{module.name}")
print([m for m in sys.modules if m.split(".")[0] == "sglang"])
"""
    assert run(code, tmp_path) == "[]"


def test_source_files_stay_small():
    files = [*ROOT.glob("aspire_sglang/**/*.py"), *ROOT.glob("bench/**/*.py")]
    long = {str(f): n for f in files if (n := len(f.read_text().splitlines())) > 400}
    assert not long
