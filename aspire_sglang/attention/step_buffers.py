"""The rows of a mixed step on the device, at addresses that a captured CUDA graph may keep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from aspire_sglang.kernels.sample_tokens import partial_size

ALIGN = 4
"""Sections start at multiples of this many int32, 16 bytes: kernels are compiled for aligned
pointers once instead of for each mix of aligned and unaligned ones."""


@dataclass(frozen=True)
class StepView:
    """One step of ``R`` row places and ``T`` token places, some of them padding.

    Rows lie draft rows first, then full rows, and their query tokens in the same order.

    Attributes:
        slots: ``[R]`` int32 row of the request table, -1 for padding.
        order: ``[R]`` int32 place of the row in SGLang's batch.
        pending: ``[R]`` int32 drafts before this step (``k``).
        draft: ``[R]`` int32, 1 for draft rows.
        voting: ``[R]`` int32 as ``slots``, -1 where the row does not vote for its pages.
        verifying: ``[R]`` int32 as ``slots``, -1 for draft rows.
        cu_seqlens_q: ``[R + 1]`` int32.
        voters: ``[R, 2]`` int32 query tokens that vote, -1 for none.
        token_row: ``[T]`` int32, -1 for padding.
        token_step: ``[T]`` int32 positions after the row's final KV.
        temperature: ``[R]`` float32, 0 for greedy rows.
        key_low, key_high: ``[R]`` int32, halves of the key of the row's sampling noise.
        row_lens: ``[R]`` int64 tokens with final KV (``S``).
        context_lens: ``[R]`` int32 positions up to and including the row's last query.
        input_ids, positions, out_cache_loc: ``[T]`` int64.
        next_tokens: ``[T]`` int64 to write to, the token after each query token.
    """

    slots: Tensor
    order: Tensor
    pending: Tensor
    draft: Tensor
    voting: Tensor
    cu_seqlens_q: Tensor
    voters: Tensor
    token_row: Tensor
    token_step: Tensor
    temperature: Tensor
    key_low: Tensor
    key_high: Tensor
    verifying: Tensor
    row_lens: Tensor
    context_lens: Tensor
    input_ids: Tensor
    positions: Tensor
    out_cache_loc: Tensor
    next_tokens: Tensor

    @property
    def num_rows(self) -> int:
        return self.slots.shape[0]


class StepBuffers:
    """Memory for one step at a time; steps follow each other on one stream.

    Attributes:
        view: ``(rows, tokens)`` to the buffers of a step of that size.
        partial: scratch of :func:`aspire_sglang.kernels.sample_tokens.sample_tokens`.

    Args:
        max_rows: most row places.
        max_tokens: most token places.
        device: of all tensors.
    """

    def __init__(self, max_rows: int, max_tokens: int, device: torch.device | str) -> None:
        self.max_rows, self.max_tokens = max_rows, max_tokens
        self.device = torch.device(device)

        def zeros(count: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(count, dtype=dtype, device=device)

        self._packed = zeros(_sections(max_rows, max_tokens)[-1], torch.int32)
        self._row_lens = zeros(max_rows, torch.int64)
        self._context_lens = zeros(max_rows, torch.int32)
        self._input_ids = zeros(max_tokens, torch.int64)
        self._positions = zeros(max_tokens, torch.int64)
        self._out_cache_loc = zeros(max_tokens, torch.int64)
        self._next_tokens = zeros(max_tokens, torch.int64)
        self._graph_inputs: tuple[Tensor, Tensor, Tensor] | None = None
        self.partial = zeros(partial_size(max_tokens), torch.int64)
        # Eighteen slices a step are worth remembering; graphs come back to the same few sizes.
        self.view = lru_cache(maxsize=512)(self._view)

    @property
    def adopted(self) -> bool:
        """Whether steps that graphs hold lie in the memory that the graphs read."""
        return self._graph_inputs is not None

    def adopt(self, input_ids: Tensor, positions: Tensor, out_cache_loc: Tensor) -> None:
        """Put the tokens of all steps that fit into the memory that captured graphs will read, so
        that nothing has to be copied before a replay.

        Views made before are stale. Steps that do not fit stay in memory of their own.

        Args:
            input_ids, positions, out_cache_loc: ``[T]`` int64, of the largest graph.
        """
        self._graph_inputs = input_ids, positions, out_cache_loc
        self.view.cache_clear()

    def _inputs(self, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        if self._graph_inputs is not None and tokens <= self._graph_inputs[0].shape[0]:
            return self._graph_inputs
        return self._input_ids, self._positions, self._out_cache_loc

    def _view(self, rows: int, tokens: int) -> StepView:
        """The buffers of a step; equal sizes give equal addresses.

        Raises:
            ValueError: if the step is larger than the buffers.
        """
        if rows > self.max_rows or tokens > self.max_tokens:
            raise ValueError(
                f"a step of {rows} rows and {tokens} tokens does not fit into "
                f"{self.max_rows} and {self.max_tokens}"
            )
        starts = iter(_sections(rows, tokens))
        input_ids, positions, out_cache_loc = self._inputs(tokens)

        def section(size: int) -> Tensor:
            start = next(starts)
            return self._packed[start : start + size]

        # Evaluated in the order of the sections.
        return StepView(
            slots=section(rows),
            order=section(rows),
            pending=section(rows),
            draft=section(rows),
            voting=section(rows),
            cu_seqlens_q=section(rows + 1),
            voters=section(2 * rows).view(rows, 2),
            token_row=section(tokens),
            token_step=section(tokens),
            temperature=section(rows).view(torch.float32),
            key_low=section(rows),
            key_high=section(rows),
            verifying=section(rows),
            row_lens=self._row_lens[:rows],
            context_lens=self._context_lens[:rows],
            input_ids=input_ids[:tokens],
            positions=positions[:tokens],
            out_cache_loc=out_cache_loc[:tokens],
            next_tokens=self._next_tokens[:tokens],
        )

    def load(self, packed: np.ndarray, rows: int, tokens: int) -> StepView:
        """Copy what :func:`pack_step` made to the device, without waiting for it."""
        on_device = self.device.type == "cuda"
        host = torch.empty(packed.shape[0], dtype=torch.int32, pin_memory=on_device)
        host.numpy()[:] = packed
        self._packed[: packed.shape[0]].copy_(host, non_blocking=True)
        return self.view(rows, tokens)

    def load_inert(self, rows: int, tokens: int) -> StepView:
        """A step of padding only, for warming up and for capturing a graph."""
        view = self.view(rows, tokens)
        for name in ("slots", "voting", "verifying", "voters", "token_row"):
            getattr(view, name).fill_(-1)
        for name in ("order", "pending", "draft", "cu_seqlens_q", "token_step", "row_lens"):
            getattr(view, name).zero_()
        for name in ("context_lens", "input_ids", "positions", "out_cache_loc", "temperature"):
            getattr(view, name).zero_()
        return view


def _sections(rows: int, tokens: int) -> list[int]:
    """Where each packed section starts, and the length of all."""
    starts = [0]
    for size in (*[rows] * 5, rows + 1, 2 * rows, tokens, tokens, *[rows] * 4):
        starts.append(starts[-1] + -(-size // ALIGN) * ALIGN)
    return starts


@dataclass(frozen=True)
class HostStep:
    """What the host decided about one step.

    Attributes:
        order: batch rows in the order of the step: draft rows, then verify rows.
        num_drafts: how many of them draft.
        pending: drafts per batch row before the step.
        slots: request-pool row per batch row.
        num_tokens: query tokens without padding.
        temperature: per batch row, 0 for greedy requests; None if all are greedy.
        keys: uint64 per batch row, see :mod:`aspire_sglang.kernels.sample_tokens`; None likewise.
    """

    order: np.ndarray
    num_drafts: int
    pending: np.ndarray
    slots: np.ndarray
    num_tokens: int
    temperature: np.ndarray | None = None
    keys: np.ndarray | None = None

    @classmethod
    def build(
        cls,
        slots: Sequence[int],
        pending: Sequence[int],
        verify: Sequence[bool],
        temperature: np.ndarray | None = None,
        keys: np.ndarray | None = None,
        left_out: Sequence[int] = (),
    ) -> HostStep:
        """Put draft rows before verify rows, each group in batch order.

        ``left_out``: batch rows that take no part.
        """
        modes = np.asarray(verify, dtype=bool)
        drafts = np.asarray(pending, dtype=np.int32)
        drafting, verifying = ~modes, modes
        if left_out:
            takes_part = np.ones(len(modes), dtype=bool)
            takes_part[list(left_out)] = False
            drafting, verifying = drafting & takes_part, verifying & takes_part
        draft_rows, verify_rows = np.flatnonzero(drafting), np.flatnonzero(verifying)
        order = np.concatenate([draft_rows, verify_rows])
        tokens = len(order) + int(drafts[verify_rows].sum())
        return cls(
            order.astype(np.int32),
            len(draft_rows),
            drafts,
            np.asarray(slots, dtype=np.int32),
            tokens,
            temperature,
            keys,
        )

    @property
    def draft_rows(self) -> list[int]:
        """Batch rows that draft."""
        return self.order[: self.num_drafts].tolist()

    @property
    def verify_rows(self) -> list[int]:
        """Batch rows that verify."""
        return self.order[self.num_drafts :].tolist()


def pack_step(step: HostStep, rows: int, tokens: int, *, drafts_vote: bool) -> np.ndarray:
    """The int32 sections of a step, padded to ``rows`` and ``tokens``.

    Args:
        drafts_vote: whether draft rows vote for their pages.
    """
    starts = _sections(rows, tokens)
    packed = np.zeros(starts[-1], dtype=np.int32)
    count, used = len(step.order), step.num_tokens
    slots = step.slots[step.order]
    pending = step.pending[step.order]
    draft = np.arange(count) < step.num_drafts
    q_lens = np.where(draft, 1, pending + 1)
    ends = np.cumsum(q_lens)
    first = ends - q_lens

    def section(index: int, size: int) -> np.ndarray:
        return packed[starts[index] : starts[index] + size]

    section(0, rows)[:] = -1
    section(0, count)[:] = slots
    section(1, count)[:] = step.order
    section(2, count)[:] = pending
    section(3, count)[:] = draft
    section(4, rows)[:] = -1
    section(4, count)[:] = slots if drafts_vote else np.where(draft, -1, slots)
    indptr = section(5, rows + 1)
    indptr[1 : count + 1] = ends
    indptr[count + 1 :] = used
    voters = section(6, 2 * rows).reshape(rows, 2)
    voters[:] = -1
    voters[:count, 0] = first
    # The first query of a verify speaks for the bonus token, the last for the newest draft.
    voters[:count, 1] = np.where(q_lens > 1, ends - 1, -1)
    row = np.repeat(np.arange(count), q_lens)
    section(7, tokens)[:] = -1
    section(7, used)[:] = row
    section(8, used)[:] = np.arange(used) - first[row] + np.where(draft, pending, 0)[row]
    if step.temperature is not None and step.keys is not None:
        section(9, count).view(np.float32)[:] = step.temperature[step.order]
        halves = step.keys[step.order].view(np.int32).reshape(count, 2)
        section(10, count)[:] = halves[:, 0]
        section(11, count)[:] = halves[:, 1]
    section(12, rows)[:] = -1
    section(12, count)[:] = np.where(draft, -1, slots)
    return packed
