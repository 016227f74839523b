"""From "who verifies" to the tensors of one ragged forward over draft and verify rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from aspire_sglang.speculation.cost_model import StepShape


@dataclass(frozen=True)
class StepPlan:
    """One mixed forward: row ``i`` has ``q_lens[i]`` query tokens.

    A draft row has one query token at position ``seq_lens[i] + pending[i]`` and reads its sparse
    context. A verify row has ``pending[i] + 1`` query tokens from position ``seq_lens[i]`` and
    reads everything; with no pending drafts it is a plain decode row.

    The query tokens lie in the flat batch draft rows first, then verify rows, each group in row
    order, so that either group is a slice of queries, of attention output and of logits.
    """

    slots: list[int]
    seq_lens: list[int]
    pending: list[int]
    verify: list[bool]
    q_lens: list[int]
    input_ids: torch.Tensor
    """``[T]`` int64."""
    positions: torch.Tensor
    """``[T]`` int64."""
    out_cache_loc: torch.Tensor
    """``[T]`` int64, KV slots written by this forward."""
    draft_rows: list[int]
    verify_rows: list[int]

    @property
    def num_tokens(self) -> int:
        """Query tokens of the step."""
        return self.input_ids.shape[0]

    @property
    def mixed(self) -> bool:
        """Whether draft and verify rows share this step."""
        return bool(self.verify_rows) and bool(self.draft_rows)

    def shape(self, draft_kv: Sequence[int] | np.ndarray) -> StepShape:
        """What the step costs, for the cost model; ``draft_kv[i]``: tokens draft row i reads."""
        return step_shape(self.seq_lens, self.pending, self.verify, draft_kv)


def step_shape(
    seq_lens: Sequence[int] | np.ndarray,
    pending: Sequence[int] | np.ndarray,
    verify: Sequence[bool] | np.ndarray,
    draft_kv: Sequence[int] | np.ndarray,
) -> StepShape:
    """What a step costs, for the cost model; ``draft_kv[i]``: tokens that draft row i reads."""
    full = np.asarray(verify, dtype=bool)
    drafts = np.asarray(pending, dtype=np.int64)
    queries = np.where(full, drafts + 1, 1)
    read = np.where(full, np.asarray(seq_lens, dtype=np.int64) + drafts + 1, draft_kv)
    return StepShape(int(queries.sum()), int(read.sum()), int((queries * read).sum()))


def build_plan(
    *,
    slots: list[int],
    seq_lens: list[int],
    pending: list[int],
    verify: list[bool],
    bonus: torch.Tensor,
    draft_tokens: torch.Tensor,
    req_to_token: torch.Tensor,
) -> StepPlan:
    """Lay out one step.

    Args:
        slots: request-pool row of each request.
        seq_lens: tokens with final KV per request (``S``).
        pending: drafts per request (``k``).
        verify: mode per request.
        bonus: ``[bs]`` last committed token of each request, its KV not yet written.
        draft_tokens: ``[num_slots, gamma_max]`` pending drafts.
        req_to_token: ``[num_slots, width]`` KV slot of each position.
    """
    q_lens = [k + 1 if v else 1 for k, v in zip(pending, verify, strict=True)]
    draft_rows = [i for i, v in enumerate(verify) if not v]
    verify_rows = [i for i, v in enumerate(verify) if v]
    row: list[int] = []
    step: list[int] = []
    for i in (*draft_rows, *verify_rows):
        row += [i] * q_lens[i]
        step += range(pending[i] + 1 - q_lens[i], pending[i] + 1)
    device = req_to_token.device
    row_t = torch.tensor(row, dtype=torch.int64, device=device)
    step_t = torch.tensor(step, dtype=torch.int64, device=device)
    slot_t = torch.tensor(slots, dtype=torch.int64, device=device)
    # Column 0 of a chain is the bonus token, column j its j-th draft.
    chains = torch.cat([bonus[:, None].to(draft_tokens.dtype), draft_tokens[slot_t]], dim=1)
    positions = torch.tensor(seq_lens, dtype=torch.int64, device=device)[row_t] + step_t
    return StepPlan(
        slots=slots,
        seq_lens=seq_lens,
        pending=pending,
        verify=verify,
        q_lens=q_lens,
        input_ids=chains[row_t, step_t],
        positions=positions,
        out_cache_loc=req_to_token[slot_t[row_t], positions].long(),
        draft_rows=draft_rows,
        verify_rows=verify_rows,
    )
