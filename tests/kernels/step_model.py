"""Layers of one KV pool, attended by the GPU's mixed step and by the CPU implementation."""

from __future__ import annotations

from types import SimpleNamespace

import torch
import triton

from aspire_sglang.attention.cpu_mixed import CpuMixedAttention
from aspire_sglang.attention.gpu_layered import create_gpu_attention
from aspire_sglang.attention.mixed import AttentionSpec, create_mixed_attention
from aspire_sglang.attention.rows import ForwardRows
from aspire_sglang.attention.step_buffers import HostStep, StepBuffers, StepView, pack_step
from aspire_sglang.attention.triton_mixed import Launch, TritonMixedAttention
from aspire_sglang.context.selection import SelectionConfig
from aspire_sglang.context.sparse import RefreshConfig, SparseContext
from aspire_sglang.kernels.step_layout import lay_out_step
from tests.kernels.layer_cases import same_selection

KV_HEADS, GROUP, DIM, WIDTH = 2, 3, 64, 320

INTERPRETED = Launch(
    block_n=128, small_m=16, large_m=16, warps=4, stages=2, programs=3, min_share=4
)
"""The interpreter's time goes by operations, however large: long contexts in three blocks."""


def lay_out(buffers, step, rows, tokens, seq_lens, state, table, drafts_vote=True):
    view = buffers.load(pack_step(step, rows, tokens, drafts_vote=drafts_vote), rows, tokens)
    lay_out_step(
        view.slots, view.order, view.pending, view.token_row, view.token_step, seq_lens,
        state.bonus, state.drafts, state.pending, table, view.input_ids, view.positions,
        view.out_cache_loc, view.row_lens, view.context_lens,
    )  # fmt: skip
    return view


SELECTION = SelectionConfig(page_size=16, min_pages=6, ratio=0.1, last_pages=2)


class Model:
    """A few layers of one pool, attended by the GPU and by the CPU implementation.

    ``device``, ``dtype`` and ``kernel`` are those of the first; the other is always float32.
    """

    def __init__(
        self,
        page: int,
        refresh: RefreshConfig,
        reads_all: bool = True,
        selection: SelectionConfig = SELECTION,
        layers: int = 3,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        kernel: str = "triton",
    ) -> None:
        rng = torch.Generator().manual_seed(page)
        slots = 6 * WIDTH + page
        self.num_layers, self.device, self.dtype = layers, device, dtype
        shape = (2, layers, slots, KV_HEADS, DIM)
        self.pools = torch.randn(shape, generator=rng).to(device, dtype)
        self.k, self.v = self.pools.cpu().float()
        pages = torch.randperm(6 * WIDTH // page, generator=rng) + 1
        places = (pages.view(-1, 1) * page + torch.arange(page)).view(6, WIDTH)
        self.table = places.int()

        def context(device: str):
            return SparseContext(
                selection, refresh, num_layers=layers, num_slots=6, context_len=WIDTH, device=device
            )

        spec = AttentionSpec(GROUP * KV_HEADS, KV_HEADS, DIM, page, dtype, dtype, DIM**-0.5)
        if triton.knobs.runtime.interpret:
            mixed = TritonMixedAttention(spec, max_seqlen_q=5, device=device, launch=INTERPRETED)
        else:
            mixed = create_mixed_attention(kernel, spec, max_seqlen_q=5, device=device)
        self.gpu = create_gpu_attention(
            mixed,
            context(device),
            req_to_token=self.table.to(device),
            page_size=page,
            max_rows=8,
            max_seqlen_q=5,
            refresh_reads_all=reads_all,
        )
        pool = SimpleNamespace(
            start_layer=0,
            head_major=lambda layer: (
                self.k[layer].transpose(0, 1).contiguous(),
                self.v[layer].transpose(0, 1).contiguous(),
            ),
        )
        self.cpu = CpuMixedAttention(num_heads=GROUP * KV_HEADS, req_to_token=self.table, pool=pool)
        self.cpu.context = context("cpu")
        self.buffers = StepBuffers(8, 40, device)
        self.state = SimpleNamespace(
            bonus=torch.zeros(6, dtype=torch.int64, device=device),
            drafts=torch.zeros((6, 4), dtype=torch.int64, device=device),
            pending=torch.zeros(6, dtype=torch.int64, device=device),
        )
        self.rng = rng

    def layers(self):
        for number in range(self.num_layers):
            yield SimpleNamespace(layer_id=number, scaling=DIM**-0.5, logit_cap=0.0)

    def queries(self, tokens: int) -> torch.Tensor:
        q = 2 * torch.randn((tokens, GROUP * KV_HEADS, DIM), generator=self.rng)
        return q.to(self.dtype).float()

    def attend(self, layer, q: torch.Tensor, out: torch.Tensor) -> None:
        """Attention of one layer of a planned step; ``q`` and ``out`` on the device."""
        self.gpu.attend(layer, q, *self.pools[:, layer.layer_id], out)

    def prefill(self, slots: list[int], lens: list[int]) -> None:
        rows = ForwardRows(slots, [3] * len(slots), lens, [False] * len(slots))
        self.cpu.plan(rows)
        ends = torch.arange(1, len(slots) + 1) * 3
        given = torch.tensor(slots), torch.tensor(lens), ends
        self.gpu.plan_prefill(*(tensor.to(self.device) for tensor in given))
        for layer in self.layers():
            q = self.queries(3 * len(slots))
            self.cpu.attend(layer, q, torch.empty_like(q))
            if self.gpu.context.full_rows_vote(layer.layer_id):
                queries = q.to(self.device, self.dtype)
                self.gpu.vote_prefill(layer, queries, *self.pools[:, layer.layer_id])
        self.same_lists()

    def load(self, host: HostStep, rows: int, tokens: int, seq_lens: list[int]) -> StepView:
        """Put a step into the buffers."""
        lens, votes = torch.tensor(seq_lens, device=self.device), self.gpu.context.refresh
        table = self.table.to(self.device)
        return lay_out(self.buffers, host, rows, tokens, lens, self.state, table, votes.drafts_vote)

    def step(self, slots, seq_lens, pending, verify, *, pad=0) -> None:
        host = HostStep.build(slots, pending, verify)
        rows, tokens = len(slots) + pad, host.num_tokens + pad
        self.gpu.plan(self.load(host, rows, tokens, seq_lens))
        q_lens = [k + 1 if v else 1 for k, v in zip(pending, verify, strict=True)]
        lens = [s + k + 1 for s, k in zip(seq_lens, pending, strict=True)]
        self.cpu.plan(ForwardRows(slots, q_lens, lens, [not v for v in verify], decoding=True))
        for layer in self.layers():
            q = self.queries(tokens)
            used = host.num_tokens
            want = torch.empty_like(q[:used])
            queries = q.to(self.device, self.dtype)
            got = torch.zeros_like(queries)
            self.cpu.attend(layer, q[:used], want)
            self.attend(layer, queries, got)
            torch.testing.assert_close(got[:used].cpu().float(), want, atol=2e-5, rtol=2e-5)
            assert not got[used:].any()
        self.same_lists()

    def same_lists(self) -> None:
        if self.gpu.context.layer_lists is not None:
            config = self.gpu.context.selection
            forced = config.sink_pages + config.last_pages
            ours, theirs = self.gpu.context.layer_lists, self.cpu.context.layer_lists
            same_selection(ours, theirs, any_order=forced)
            return
        ours, theirs = self.gpu.context.lists, self.cpu.context.lists
        assert ours.counts.tolist() == theirs.counts.tolist()
        assert ours.built_for.tolist() == theirs.built_for.tolist()
        for slot, count in enumerate(theirs.counts.tolist()):
            assert ours.pages[slot, :count].tolist() == theirs.pages[slot, :count].tolist()


def logits_of(model, layer, slot, q, positions):
    keys = model.k[layer][model.table[slot].long()[positions]].repeat_interleave(GROUP, 1)
    return torch.einsum("hd,nhd->hn", q, keys) * DIM**-0.5


def attention(model, layer, slot, q, positions):
    logits = logits_of(model, layer, slot, q, positions)
    values = model.v[layer][model.table[slot].long()[positions]].repeat_interleave(GROUP, 1)
    return torch.einsum("hn,nhd->hd", logits.softmax(-1), values), logits.logsumexp(-1)
