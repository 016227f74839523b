"""CPU platform of SGLang in pure PyTorch: entry point of the group ``sglang.srt.platforms``.

Active only where no accelerator exists, so that installing the package never changes a GPU host.
"""

from __future__ import annotations

import os


def activate() -> str | None:
    """Return the platform class for SGLang to load, or ``None`` where an accelerator exists or
    SGLang's own CPU engine was asked for (``SGLANG_USE_CPU_ENGINE=1``)."""
    import torch

    if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
        return None
    if torch.cuda.is_available() or torch.xpu.is_available() or torch.backends.mps.is_available():
        return None
    # The scheduler shares its cores with tokenizer, detokenizer and clients. OpenMP threads that
    # spin for long at barriers then lose whole time slices at each of the ~500 parallel regions of
    # a step: a busy neighbour made steps ten times slower. Spinning briefly before going to sleep
    # is as fast when quiet and loses far less. Read when the worker processes load their OpenMP
    # library, so it must be in the environment before they start.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "20000")
    # After a crash SGLang waits a minute for CUDA core dumps before it ends the other processes.
    os.environ.setdefault("SGLANG_CUDA_COREDUMP_BEFORE_CRASH", "0")
    return "aspire_sglang.cpu_platform.platform.TorchCpuPlatform"


def is_active() -> bool:
    """Whether SGLang runs on this platform in the current process."""
    from sglang.srt.platforms import current_platform

    return current_platform.device_name == "aspire-cpu"
