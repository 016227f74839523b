"""The platform object that SGLang asks about the device."""

from __future__ import annotations

import psutil
import torch
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import SRTPlatform


class TorchCpuPlatform(SRTPlatform):
    """A CPU without vendor kernels: eager PyTorch, no graphs, no pinned memory."""

    _enum = PlatformEnum.OOT
    device_name = "aspire-cpu"
    device_type = "cpu"

    def apply_server_args_defaults(self, server_args) -> None:
        # Event streams do not exist on a CPU, so there is nothing to overlap with.
        server_args.disable_overlap_schedule = True
        # An idle scheduler would otherwise poll on a core that computes for others.
        server_args.sleep_on_idle = True

    def init_backend(self) -> None:
        from aspire_sglang.cpu_platform.ops import register_ops

        register_ops(self.get_dispatch_key_name())

    def get_default_attention_backend(self) -> str:
        return "aspire"

    def get_mha_kv_pool_cls(self) -> type:
        from aspire_sglang.cpu_platform.kv_pool import kv_pool_class

        return kv_pool_class()

    def get_paged_allocator_cls(self) -> type:
        from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator

        return PagedTokenToKVPoolAllocator

    def get_device(self, device_id: int | None = 0) -> str:
        return "cpu"

    def get_device_name(self, device_id: int = 0) -> str:
        return "cpu"

    def get_device_total_memory(self, device_id: int = 0) -> int:
        return psutil.virtual_memory().total

    def get_current_memory_usage(self, device: torch.device | None = None) -> float:
        memory = psutil.virtual_memory()
        return memory.total - memory.available

    def get_available_memory(self, device_id: int = 0) -> tuple[int, int]:
        memory = psutil.virtual_memory()
        return memory.available, memory.total

    def get_torch_profiler_activity_str(self) -> str:
        return "CPU"

    def get_torch_profiler_activity(self) -> torch.profiler.ProfilerActivity:
        return torch.profiler.ProfilerActivity.CPU
