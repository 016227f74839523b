"""The rows of one forward, as an attention implementation sees them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ForwardRows:
    """A ragged batch whose query tokens lie draft rows first, then full rows, in row order.

    A full row's queries are the last ``q_lens[i]`` of its ``context_lens[i]`` positions and see
    everything before them. A draft row has one query, at the last position, and reads its sparse
    context.

    Attributes:
        slots: row of the request table per row.
        q_lens: query tokens.
        context_lens: positions up to and including the last query.
        draft: whether the row is a draft row.
        decoding: the forward is a mixed decode step, not a prefill.
    """

    slots: list[int]
    q_lens: list[int]
    context_lens: list[int]
    draft: list[bool]
    decoding: bool = False

    @property
    def full_rows(self) -> list[int]:
        return [i for i, draft in enumerate(self.draft) if not draft]

    @property
    def draft_rows(self) -> list[int]:
        return [i for i, draft in enumerate(self.draft) if draft]
