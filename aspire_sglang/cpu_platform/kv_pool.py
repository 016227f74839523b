"""KV pool with one contiguous stretch of memory per head.

Skinny matrix products (a few query rows against thousands of keys) run about twice as fast when a
head's keys lie one after another than when heads are interleaved, so attention on a CPU wants the
pool head-major. To the rest of SGLang the buffers keep the usual ``[slots, heads, dim]`` shape.
"""

from __future__ import annotations

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.runtime_context import get_server_args

from aspire_sglang.cpu_platform import huge_pages


class HeadMajorKVPool(MHATokenToKVPool):
    """``k_buffer[l]``/``v_buffer[l]``: ``[slots, heads, dim]`` views of ``[heads, slots, dim]``."""

    def _create_buffers_normal(self) -> None:
        slots = self.size + self.page_size

        def buffers(dim: int) -> list[torch.Tensor]:
            shape = (self.head_num, slots, dim)
            return [
                huge_pages.zeros(shape, self.store_dtype).transpose(0, 1)
                for _ in range(self.layer_num)
            ]

        self.k_buffer = buffers(self.head_dim)
        self.v_buffer = buffers(self.v_head_dim)

    def _store_kv_layer(self, layer_idx, loc, cache_k, cache_v) -> None:
        for buffer, cache in ((self.k_buffer, cache_k), (self.v_buffer, cache_v)):
            buffer[layer_idx].transpose(0, 1).index_copy_(1, loc.long(), cache.transpose(0, 1))

    def head_major(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer as contiguous ``[heads, slots, dim]`` tensors."""
        return (
            self.get_key_buffer(layer_id).transpose(0, 1),
            self.get_value_buffer(layer_id).transpose(0, 1),
        )


def kv_pool_class() -> type[MHATokenToKVPool]:
    """The pool that suits the attention backend in use; other backends keep SGLang's layout."""
    if get_server_args().attention_backend == "aspire":
        return HeadMajorKVPool
    return MHATokenToKVPool
