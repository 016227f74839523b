"""Hidden states of accepted tokens, in the layout of SGLang's result processing."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def report_hidden_states(
    output: Any, verify_rows: list[int], pending: list[int], accept_lens: list[int], stride: int
) -> None:
    """Keep the accepted tokens' states only, ``stride`` places per verified row.

    The state of a token of the output is the one its distribution was computed from, as in plain
    decoding: that of the query token before it.

    Args:
        output: the step's ``LogitsProcessorOutput``; its ``hidden_states`` are ``[T, H]`` rows of
            all query tokens, draft rows first, and become ``[n * stride, H]``.
        verify_rows: rows of the batch that verified.
        pending: drafts of each row of the batch.
        accept_lens: tokens to commit per verify row.
        stride: places per verified row.
    """
    states: Tensor = output.hidden_states
    kept = states.new_zeros((len(verify_rows), stride, states.shape[1]))
    first = len(pending) - len(verify_rows)  # each draft row has one query token
    for place, (row, accepted) in enumerate(zip(verify_rows, accept_lens, strict=True)):
        kept[place, :accepted] = states[first : first + accepted]
        first += pending[row] + 1
    output.hidden_states = kept.flatten(0, 1)
