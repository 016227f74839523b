"""The attention backend ``aspire`` on CUDA.

Prefill and plain decoding are SGLang's own FlashAttention 3 backend, which this class inherits.
What it adds is the mixed step over draft and verify rows, and the vote of a prefill for the pages
of the first drafts. SGLang's breakable graphs of a prefill do not hold its attention, which runs
between their pieces as in an eager prefill, on the batch's own tokens without padding. So the vote
is the same there.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from sglang.srt.layers.attention.flashattention_backend import FlashAttentionBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

from aspire_sglang.attention import gpu_mixed
from aspire_sglang.attention.gpu_layered import create_gpu_attention
from aspire_sglang.attention.gpu_mixed import GpuMixedAttention
from aspire_sglang.attention.mixed import AttentionSpec, create_mixed_attention
from aspire_sglang.attention.step_buffers import StepBuffers
from aspire_sglang.config import ContextConfig, load_config
from aspire_sglang.context.sparse import SparseContext
from aspire_sglang.runtime.arguments import is_aspire
from aspire_sglang.runtime.ranks import Ranks

logger = logging.getLogger(__name__)


class GpuAttentionBackend(FlashAttentionBackend):
    """See the module.

    Attributes:
        steps: where the worker puts the rows of a mixed step; None without speculation.
        captures_plain: graphs of plain decode steps are being captured.

    Raises:
        ValueError: for a model, a KV type or a GPU that is not supported.
    """

    needs_cpu_seq_lens = False
    supports_ragged_verify_graph = True

    def __init__(self, model_runner: Any) -> None:
        _refuse_unsupported(model_runner)
        super().__init__(model_runner)
        self.steps: StepBuffers | None = None
        self.captures_plain = False
        self._mixed: GpuMixedAttention | None = None
        if not is_aspire(model_runner.server_args):
            return
        args, pool = model_runner.server_args, model_runner.req_to_token_pool
        width = args.speculative_num_draft_tokens
        self._spec = AttentionSpec(
            num_heads=self.num_attention_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            page_size=self.page_size,
            dtype=model_runner.dtype,
            kv_dtype=self.kv_cache_dtype,
            scale=self.head_dim**-0.5,
            logit_cap=_softcap(model_runner),
        )
        from aspire_sglang.attention.backend import sparse_context

        self._context_config = load_config().context
        max_rows = pool.size
        self.steps = StepBuffers(max_rows, max_rows * width, model_runner.device)
        # One for all layers, as each is read before the next is written. Places of padding tokens
        # go on through the model: they hold zeros or what an earlier step left, never garbage.
        spec = self._spec
        shape = max_rows * width, spec.num_heads, spec.head_dim
        self._out = torch.zeros(shape, dtype=spec.dtype, device=model_runner.device)
        self._mixed = create_gpu_attention(
            create_mixed_attention("fa3", self._spec, max_seqlen_q=width),
            sparse_context(model_runner, self._context_config),
            req_to_token=pool.req_to_token,
            page_size=self.page_size,
            max_rows=max_rows,
            max_seqlen_q=width,
            refresh_reads_all=gpu_mixed.REFRESH_READS_ALL,
            ranks=Ranks.of_model(),
        )
        logger.info(
            "ASPIRE: page tables and scores of %d rows: %.2f GB", max_rows, self._mixed.memory / 1e9
        )

    @property
    def context(self) -> SparseContext | None:
        """The sparse contexts of draft rows; None on a server that does not speculate."""
        return None if self._mixed is None else self._mixed.context

    @property
    def drafts_vote(self) -> bool:
        """Whether draft rows choose their pages anew at every step."""
        return self.context is not None and self.context.refresh.drafts_vote

    def configure_context(self, config: ContextConfig) -> SparseContext:
        """The sparse contexts in use.

        Raises:
            ValueError: if ``config`` differs from that of the start: captured CUDA graphs hold the
                memory and the constants of the old one.
        """
        if config != self._context_config:
            raise ValueError("on a GPU a change of the section 'context' needs a restart")
        assert self.context is not None
        return self.context

    # -- planning: once per forward --

    def init_forward_metadata(self, forward_batch: Any) -> None:
        if forward_batch.forward_mode.is_target_verify():
            self._plan_mixed(forward_batch)
            return
        super().init_forward_metadata(forward_batch)
        if self._prefill_votes(forward_batch):
            self._speculation()[1].plan_prefill(
                forward_batch.req_pool_indices,
                forward_batch.seq_lens,
                forward_batch.extend_seq_lens.cumsum(0),
            )

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        if in_capture and self.steps is not None:
            # Shapes decide what a graph does; its rows come from the buffers at each replay, which
            # the worker has filled by then.
            if forward_batch.forward_mode.is_target_verify() and not self.steps.adopted:
                # SGLang captures the largest graph first, and all read the same memory.
                inputs = forward_batch.input_ids, forward_batch.positions
                self.steps.adopt(*inputs, forward_batch.out_cache_loc)
            self.steps.load_inert(*_places(forward_batch))
        if not forward_batch.forward_mode.is_target_verify():
            super().init_forward_metadata_out_graph(forward_batch, in_capture)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        if forward_batch.forward_mode.is_target_verify():
            steps, mixed = self._speculation()
            mixed.plan(steps.view(*_places(forward_batch)))
        else:
            super().init_forward_metadata_in_graph(forward_batch)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        # Mixed steps have memory of their own.
        if self.steps is None or self.captures_plain:
            super().init_cuda_graph_state(max_bs, max_num_tokens)

    def _plan_mixed(self, forward_batch: Any) -> None:
        steps, mixed = self._speculation()
        rows, tokens = _places(forward_batch)
        if getattr(forward_batch.spec_info, "staged", False):
            step = steps.view(rows, tokens)
        else:
            # SGLang's own warm-up: no rows of ours.
            step = steps.load_inert(min(rows, steps.max_rows), tokens)
        mixed.plan(step)

    def _speculation(self) -> tuple[StepBuffers, GpuMixedAttention]:
        assert self.steps is not None
        assert self._mixed is not None
        return self.steps, self._mixed

    def _prefill_votes(self, forward_batch: Any) -> bool:
        return (
            self._mixed is not None
            and forward_batch.forward_mode.is_extend()
            and self._mixed.context.refresh.source != "window"
        )

    # -- running: once per layer --

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs):
        """Attention of one layer over all rows.

        Args:
            q: ``[T, Hq * D]``. k, v: ``[T, Hkv, D]``, the new tokens'. layer: ``RadixAttention``.

        Returns:
            ``[T, Hq * D]``.
        """
        query = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        if not forward_batch.forward_mode.is_target_verify():
            out = super().forward_extend(
                q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache, **kwargs
            )
            if self._prefill_votes(forward_batch):
                mixed = self._speculation()[1]
                if mixed.context.full_rows_vote(layer.layer_id):
                    mixed.vote_prefill(layer, query, *self._pool_of(layer))
            return out
        if layer.scaling != self._spec.scale or (layer.logit_cap or 0.0) != self._spec.logit_cap:
            raise ValueError(
                f"layer {layer.layer_id} scales or caps its logits unlike the others "
                f"({layer.scaling}, {layer.logit_cap}); ASPIRE supports one scale per model"
            )
        if save_kv_cache:
            self.token_to_kv_pool.set_kv_buffer(
                layer, KVWriteLoc(forward_batch.out_cache_loc, None), k, v
            )
        out = self._out[: q.shape[0]]
        self._speculation()[1].attend(layer, query, *self._pool_of(layer), out)
        return out.view(q.shape[0], -1)

    def _pool_of(self, layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
        pool = self.token_to_kv_pool
        return pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)


def _places(forward_batch: Any) -> tuple[int, int]:
    return forward_batch.batch_size, forward_batch.positions.shape[0]


def _softcap(model_runner: Any) -> float:
    config = model_runner.model_config.hf_text_config
    return float(getattr(config, "attn_logit_softcapping", None) or 0.0)


def _refuse_unsupported(model_runner: Any) -> None:
    name = "--attention-backend aspire"
    if torch.cuda.get_device_capability()[0] != 9:
        raise ValueError(f"{name}: needs a Hopper GPU (compute capability 9) or a CPU.")
    if model_runner.use_mla_backend:
        raise ValueError(f"{name}: multi-head latent attention is not supported.")
    if model_runner.sliding_window_size is not None and model_runner.sliding_window_size > -1:
        raise ValueError(f"{name}: sliding-window models are not supported.")
    config = model_runner.model_config
    if config.head_dim not in (64, 128, 256):
        raise ValueError(f"{name}: heads of {config.head_dim} are not supported.")
    if getattr(config, "model_is_mrope", False) or config.is_encoder_decoder:
        raise ValueError(f"{name}: multimodal and encoder-decoder models are not supported.")
    if model_runner.kv_cache_dtype != model_runner.dtype:
        raise ValueError(
            f"{name}: --kv-cache-dtype must be that of the model ({model_runner.dtype}), "
            f"not {model_runner.kv_cache_dtype}."
        )
