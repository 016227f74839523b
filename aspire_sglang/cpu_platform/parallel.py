"""Tensor parallelism on the CPU platform: groups that talk over gloo, and operators for a shard."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

_GPU_COMMUNICATORS = (
    "use_pynccl",
    "use_custom_allreduce",
    "use_mscclpp_allreduce",
    "use_torch_symm_mem_allreduce",
)


def model_parallel_group(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """AROUND ``init_model_parallel_group``: a group without the communicators of GPUs."""
    return original(*args, **kwargs | dict.fromkeys(_GPU_COMMUNICATORS, False))


def masked_input_and_mask(
    input_: Tensor,
    org_vocab_start_index: int,
    org_vocab_end_index: int,
    num_org_vocab_padding: int,
    added_vocab_start_index: int,
    added_vocab_end_index: int,
) -> tuple[Tensor, Tensor]:
    """REPLACE ``get_masked_input_and_mask``: which row of a rank's embedding a token is.

    A rank holds the rows of the tokens from ``org_vocab_start_index`` on, padding, and the rows of
    the added tokens from ``added_vocab_start_index`` on; ends are exclusive.

    Args:
        input_: token ids of any shape.

    Returns:
        Row of each token, 0 for those of other ranks, and a bool mask of these.
    """
    own = (input_ >= org_vocab_start_index) & (input_ < org_vocab_end_index)
    added = (input_ >= added_vocab_start_index) & (input_ < added_vocab_end_index)
    first_added = org_vocab_end_index - org_vocab_start_index + num_org_vocab_padding
    rows = (input_ - org_vocab_start_index) * own
    rows = rows + (input_ - added_vocab_start_index + first_added) * added
    return rows, ~(own | added)
