"""Attention of a ragged batch on the CPU: runs planned rows layer by layer, and scores pages."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from aspire_sglang.attention import cpu_votes
from aspire_sglang.attention.cpu_flash import scratch_size
from aspire_sglang.attention.cpu_job import BFLOAT16, FLOAT16, FLOAT32, JOB, write_scales
from aspire_sglang.attention.cpu_kernel import attend_pieces, merge_pieces
from aspire_sglang.attention.cpu_plan import Row, RowsPlan, plan_rows
from aspire_sglang.attention.openmp import parallel_region
from aspire_sglang.attention.program import Program
from aspire_sglang.attention.simd import LANES

_KV_TYPES = {
    torch.float32: FLOAT32,
    torch.bfloat16: BFLOAT16,
    torch.float16: FLOAT16,
}


class CpuAttention:
    """Attention over one model's KV pools.

    Args:
        num_heads: query heads ``Hq``.
        num_kv_heads: KV heads ``Hkv``; must divide ``num_heads``.
        num_slots: slots of a KV pool.
        dim: width ``D`` of a head.
        dtype: of the pools, float32, bfloat16 or float16. Sums are float32 always.

    Attributes:
        phases: attention and merging, as phases of a program; their argument is a record that
            :meth:`prepare` has filled in.

    Raises:
        ValueError: heads that do not divide, or a dtype or width that the kernel cannot read.
        RuntimeError: the process has no OpenMP runtime to share the work out.
    """

    def __init__(
        self, num_heads: int, num_kv_heads: int, num_slots: int, dim: int, dtype: torch.dtype
    ) -> None:
        if num_kv_heads < 1 or num_heads % num_kv_heads:
            raise ValueError(f"{num_heads} query heads do not divide over {num_kv_heads} KV heads")
        if dtype not in _KV_TYPES:
            raise ValueError(f"the KV cache is {dtype}; the kernel reads float32 and 16-bit floats")
        if dtype != torch.float32 and dim % LANES:
            raise ValueError(f"heads are {dim} wide; 16-bit keys need a multiple of {LANES}")
        parallel_region()  # better missed now than in the first forward
        self._pool_shape = (num_kv_heads, num_slots, dim)
        self._num_heads = num_heads
        self._dtype = dtype
        self._scratch = torch.empty(0)
        self._partials = torch.empty(0)
        self._lse = torch.empty(0)
        self._planned: RowsPlan | None = None
        self._job = job = np.zeros(1, JOB)
        job["num_heads"], job["num_kv_heads"] = num_heads, num_kv_heads
        job["num_slots"], job["dim"] = num_slots, dim
        job["kv_type"] = _KV_TYPES[dtype]
        attend = attend_pieces(num_heads // num_kv_heads, dim, _KV_TYPES[dtype])
        self.phases = (attend, merge_pieces)
        self._program = Program(*self.phases)
        self._call = np.zeros(1, JOB)
        self._program.argument[:] = self._call.ctypes.data

    def plan(self, rows: list[Row]) -> RowsPlan:
        """Plan a step; see :func:`aspire_sglang.attention.cpu_plan.plan_rows`."""
        kv_heads, slots, _ = self._pool_shape
        return plan_rows(rows, self._num_heads, kv_heads, slots)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        plan: RowsPlan,
        scale: float,
        out: Tensor | None = None,
        logit_cap: float = 0.0,
        number: int = 0,
    ) -> Tensor:
        """Attention of every row over its keys.

        Args:
            q: ``[T, Hq, D]``, rows one after another.
            k, v: ``[Hkv, num_slots, D]`` contiguous pools of one layer; the KV of the query tokens
                is written already.
            plan: from :meth:`plan`.
            scale: factor of the scores.
            out: ``[T, Hq, D]`` to write to; allocated if None.
            logit_cap: ``c`` of ``c * tanh(score / c)``; 0 for none.
            number: which slots to read, of rows that have several lists of them.

        Returns:
            ``out``, in the dtype of ``q``.

        Raises:
            ValueError: shapes or dtypes that do not fit.
        """
        self._check_pools(k, v)
        self._check_queries(q, plan)
        out = torch.empty_like(q) if out is None else out
        if plan.tokens == 0:
            return out
        queries = q.float().contiguous()
        direct = out.dtype == torch.float32 and out.is_contiguous()
        target = out if direct else torch.empty_like(queries)
        write_scales(self._call, [scale], [logit_cap])
        keys, values = np.array([k.data_ptr()]), np.array([v.data_ptr()])
        items = self.prepare(self._call, keys, values, queries, target, plan, number)
        self._program.items[:] = items
        self._program.run()
        if not direct:
            out.copy_(target)
        return out

    def prepare(
        self,
        jobs: np.ndarray,
        keys: np.ndarray,
        values: np.ndarray,
        q: Tensor,
        out: Tensor,
        plan: RowsPlan,
        first: int = 0,
        list_layers: int = 1,
    ) -> tuple[int, int]:
        """Fill in the records of consecutive layers, for a program that runs ``phases``.

        Args:
            jobs: ``JOB`` ``[layers]`` with scales and caps.
            keys, values: int64 ``[layers]``: addresses of the layers' pools, see :meth:`attend`.
            q, out: float32 ``[T, Hq, D]``, contiguous; ``q`` is written before the phases run.
            plan: of all these layers; what its rows need must not change until the program ends.
            first: the first layer.
            list_layers: layers that read the same slots, of rows that have several lists of them.

        Returns:
            Items of the two phases.

        Raises:
            ValueError: shapes that do not fit.
        """
        self._check_queries(q, plan)
        numbers = np.arange(first, first + len(jobs)) // list_layers
        if not 0 <= numbers[0] <= numbers[-1] < plan.lists:
            raise ValueError(f"list {numbers[-1]} of rows with {plan.lists} lists of slots")
        if self._lse.shape[0] < plan.tokens:
            self._lse = torch.empty(plan.tokens, self._num_heads)
        if plan is not self._planned or self._scratch.shape[0] != torch.get_num_threads():
            self._use(plan)
            self._planned = plan
        scale, cap = jobs["scale"].copy(), jobs["cap"].copy()
        jobs[:] = self._job
        jobs["scale"], jobs["cap"] = scale, cap
        jobs["k"], jobs["v"] = keys, values
        jobs["q"], jobs["out"] = q.data_ptr(), out.data_ptr()
        jobs["lse"] = self._lse.data_ptr()
        jobs["list"] = numbers
        kv_heads = self._pool_shape[0]
        return len(plan.pieces) * kv_heads, len(plan.merges) * kv_heads

    def page_scores(self, plan: RowsPlan, page_size: int, reduction: str = "max") -> list[Tensor]:
        """Scores of the voting rows' pages, from the last :meth:`attend` of this plan.

        A token's score is the ``reduction`` over query heads of its softmax probability, averaged
        over the row's voters; a page's score is the sum over its tokens.

        Args:
            page_size: tokens per page.
            reduction: ``"max"``, ``"mean"`` or ``"sum"`` over query heads.

        Returns:
            Per row with voters float32 ``[ceil(L / page_size)]``.
        """
        lengths = [row.length for row in plan.rows if row.voters]
        scores = [torch.empty(-(-length // page_size)) for length in lengths]
        ballots = np.zeros(len(scores), cpu_votes.BALLOT)
        voting = [place for place, row in enumerate(plan.rows) if row.voters]
        vote = 0
        for ballot, place, pages in zip(ballots, voting, scores, strict=True):
            row = plan.rows[place]
            ballot["length"], ballot["voters"] = row.length, len(row.voters)
            ballot["pages"] = pages.data_ptr()
            for n, voter in enumerate(row.voters):
                ballot["votes"][n] = plan.votes[vote].data_ptr()
                ballot["lse"][n] = self._lse[plan.starts[place] + voter].data_ptr()
                vote += 1
        count = np.zeros(1, cpu_votes.COUNT)
        count["ballots"] = ballots.ctypes.data
        count["num_heads"], count["width"] = self._num_heads, plan.votes.shape[2]
        count["page_size"] = page_size
        count["reduction"] = cpu_votes.REDUCTIONS.index(reduction)
        program = Program(cpu_votes.score_pages)
        program.argument[0], program.items[0] = count.ctypes.data, len(ballots)
        program.run()
        return scores

    def token_scores(self, plan: RowsPlan, reduction: str = "max") -> Tensor:
        """Scores of the voting queries' tokens over the heads of this pool alone, for ranks that
        hold a share of the heads each; from the last :meth:`attend` of this plan.

        Args:
            reduction: of the heads' softmax probabilities, ``"max"``; otherwise their sum.

        Returns:
            float32 ``[voters, width]``, row after row; 0 behind a row's keys.
        """
        scores = torch.zeros(plan.votes.shape[0], plan.votes.shape[2])
        vote = 0
        for row, start in zip(plan.rows, plan.starts, strict=True):
            length = row.length
            for voter in row.voters:
                logits = plan.votes[vote, :, :length]
                shares = torch.exp2(logits - self._lse[start + voter].unsqueeze(1))
                scores[vote, :length] = shares.amax(0) if reduction == "max" else shares.sum(0)
                vote += 1
        return scores

    def _use(self, plan: RowsPlan) -> None:
        """The plan's part of the record; scratch memory is kept from call to call."""
        kv_heads, _, dim = self._pool_shape
        job, threads = self._job, torch.get_num_threads()
        job["pieces"], job["num_pieces"] = plan.pieces.ctypes.data, len(plan.pieces)
        job["merges"], job["num_merges"] = plan.merges.ctypes.data, len(plan.merges)
        job["votes_width"] = plan.votes.shape[2]
        size = scratch_size(dim, plan.blocks)
        if self._scratch.shape != (threads, max(size, self._scratch.shape[-1])):
            self._scratch = torch.empty(threads, size)
        job["scratch"], job["scratch_size"] = self._scratch.data_ptr(), self._scratch.shape[1]
        lanes = int(plan.merges["tokens"].max(initial=0)) * self._num_heads // kv_heads
        needed = plan.partials * kv_heads * lanes * (dim + 2)
        if self._partials.numel() < needed:
            self._partials = torch.empty(needed)
        job["partials"], job["partial_size"] = self._partials.data_ptr(), lanes * (dim + 2)

    def _check_queries(self, q: Tensor, plan: RowsPlan) -> None:
        if q.shape != (plan.tokens, self._num_heads, self._pool_shape[2]):
            raise ValueError(
                f"queries {tuple(q.shape)} for {plan.tokens} tokens and {self._num_heads} heads"
            )

    def _check_pools(self, k: Tensor, v: Tensor) -> None:
        if k.shape != self._pool_shape or v.shape != k.shape:
            shapes = f"{tuple(k.shape)} and {tuple(v.shape)}"
            raise ValueError(f"pools {shapes}, planned for {self._pool_shape}")
        if not (k.is_contiguous() and v.is_contiguous()):
            raise ValueError("the KV pool must be contiguous")
        if k.dtype != self._dtype or v.dtype != self._dtype:
            raise ValueError(f"keys are {k.dtype}, values {v.dtype}, planned for {self._dtype}")
