"""The attention backend ``aspire``: SGLang's face of the mixed attention implementations."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from sglang.srt.layers.attention.attention_registry import register_attention_backend as registry
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.runtime_context import get_parallel
from sglang.srt.server_args import add_attention_backend_choices

from aspire_sglang import cpu_platform
from aspire_sglang.attention.rows import ForwardRows
from aspire_sglang.config import ContextConfig, load_config
from aspire_sglang.context.selection import SelectionConfig
from aspire_sglang.context.sparse import RefreshConfig, SparseContext
from aspire_sglang.runtime.arguments import is_aspire
from aspire_sglang.runtime.model_limits import model_faults
from aspire_sglang.runtime.ranks import Ranks

NAME = "aspire"


class AspireAttentionBackend(AttentionBackend):
    """On a CPU: prefill, plain decoding, and the mixed forward over draft and verify rows."""

    def __init__(self, model_runner: Any) -> None:
        super().__init__()
        from aspire_sglang.attention.cpu_mixed import CpuMixedAttention
        from aspire_sglang.cpu_platform.kv_pool import HeadMajorKVPool

        _refuse_unsupported(model_runner)
        self._runner = model_runner
        self._pool = model_runner.token_to_kv_pool
        self._attention = CpuMixedAttention(
            num_heads=model_runner.model_config.get_num_attention_heads(
                get_parallel().attn_tp_size
            ),
            req_to_token=model_runner.req_to_token_pool.req_to_token,
            pool=self._pool,
            ranks=Ranks.of_model(),
        )
        keys = self._pool.get_key_buffer(self._pool.start_layer)
        self._head_major = isinstance(self._pool, HeadMajorKVPool) and keys.dtype == torch.float32
        if is_aspire(model_runner.server_args):
            self.configure_context(load_config().context)

    @property
    def context(self) -> SparseContext | None:
        """The sparse contexts of draft rows; None on a server that does not speculate."""
        return self._attention.context

    def configure_context(self, config: ContextConfig) -> SparseContext:
        """Use these settings from the next forward on; present page lists are forgotten.

        Raises:
            ValueError: if the configured refresh layer does not exist.
        """
        self._attention.context = context = sparse_context(self._runner, config)
        return context

    def init_forward_metadata(self, forward_batch: Any) -> None:
        self._attention.plan(rows_of(forward_batch))

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True, **_):
        """Attention of one layer over all rows.

        Args:
            q: ``[T, Hq * D]``. k, v: ``[T, Hkv, D]``, the new tokens'. layer: ``RadixAttention``.

        Returns:
            ``[T, Hq * D]``.
        """
        if save_kv_cache:
            self._pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc, None), k, v)
        query = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        out = torch.empty_like(query)
        self._attention.attend(layer, query, out)
        return out.view(q.shape[0], -1)

    forward_decode = forward_extend

    def computes_layers(self, forward_batch: Any) -> bool:
        """Whether a kernel of whole layers can compute this forward's attention and store its KV:
        a float32 pool of whole heads."""
        return self._head_major and not forward_batch.forward_mode.is_idle()

    @property
    def phases(self) -> tuple[Any, ...]:
        """Attention as phases of a program; their argument is the layer's ``JOB``."""
        return self._attention.phases

    def prepare_layers(
        self, jobs: np.ndarray, first: int, q: torch.Tensor, out: torch.Tensor
    ) -> tuple[int, tuple[int, ...]]:
        """Prepare the attention of consecutive layers for a program that computes whole layers.

        Args:
            jobs: ``JOB`` records of :mod:`aspire_sglang.attention.cpu_job`, one per layer, with
                scales and caps; those of the layers prepared are written.
            first: the first layer.
            q, out: float32 ``[T, Hq, D]``, shared by the layers; written by the program.

        Returns:
            The layer behind the last one prepared, and the items of each phase.
        """
        return self._attention.prepare(jobs, first, q, out)

    def finish_layer(self, layer: int) -> None:
        """Do what comes after the attention of a layer, the last of those prepared: votes."""
        self._attention.attended(layer)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def support_triton(self) -> bool:
        return False


def _refuse_unsupported(model_runner: Any) -> None:
    # A speculating server has been refused earlier, by its configuration; plain decoding on this
    # backend must not ignore a model's window either.
    faults = model_faults(model_runner.model_config, on_cpu=True)
    if (model_runner.sliding_window_size or -1) > -1:
        faults.append("sliding-window models are not supported")
    if faults:
        raise ValueError(f"--attention-backend {NAME}: {'; '.join(faults)}.")


def rows_of(forward_batch: Any) -> ForwardRows:
    """The rows of SGLang's forward: prefill chunks, plain decode rows, or a mixed step."""
    if forward_batch.forward_mode.is_target_verify():
        plan = forward_batch.spec_info.plan
        return ForwardRows(
            slots=plan.slots,
            q_lens=plan.q_lens,
            context_lens=[s + k + 1 for s, k in zip(plan.seq_lens, plan.pending, strict=True)],
            draft=[not verify for verify in plan.verify],
            decoding=True,
        )
    slots = forward_batch.req_pool_indices.tolist()
    context_lens = forward_batch.seq_lens.tolist()
    if forward_batch.forward_mode.is_decode_or_idle():
        q_lens = [1] * len(slots)
    else:
        q_lens = [int(n) for n in forward_batch.extend_seq_lens_cpu]
    return ForwardRows(slots, q_lens, context_lens, [False] * len(slots))


def sparse_context(model_runner: Any, config: ContextConfig) -> SparseContext:
    """The sparse contexts of this model's requests, from the configuration.

    Raises:
        ValueError: if the configured refresh layer does not exist.
    """
    num_layers = model_runner.model_config.num_hidden_layers
    layer = config.refresh_layer
    groups = config.refresh_layers
    if groups is None and config.selection == "delta":
        groups = [num_layers * n // 4 for n in (1, 2, 3)]
    return SparseContext(
        SelectionConfig(
            page_size=config.page_size,
            min_pages=config.min_pages,
            ratio=config.ratio,
            sink_pages=config.sink_pages,
            last_pages=config.last_pages,
            reduction=config.reduction,
        ),
        RefreshConfig(
            source=config.selection,
            # A middle layer: late layers choose worse pages for the layers below the next step.
            layer=(num_layers - 1) // 2 if layer is None else layer,
            same_step=config.refresh_applies == "same_step",
            own_share=config.own_share,
            list_layers=config.list_layers,
            group_layers=tuple(groups or ()),
            full_layers=config.full_layers,
        ),
        num_layers=num_layers,
        num_slots=model_runner.req_to_token_pool.req_to_token.shape[0],
        # The width of the request table: the longest context and room for drafts.
        context_len=model_runner.req_to_token_pool.req_to_token.shape[1],
        device=model_runner.device,
    )


def register_attention_backend() -> None:
    """Make ``--attention-backend aspire`` known to this process."""
    add_attention_backend_choices([NAME])

    @registry(NAME)
    def create(model_runner: Any) -> AttentionBackend:
        if cpu_platform.is_active():
            return AspireAttentionBackend(model_runner)
        from aspire_sglang.attention.gpu_backend import GpuAttentionBackend

        return GpuAttentionBackend(model_runner)
