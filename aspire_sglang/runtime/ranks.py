"""What tensor-parallel ranks agree on, so that all of them take every step alike.

Every rank runs SGLang's scheduler over the same requests, which the first rank broadcasts, and
decides by itself who drafts and who verifies. That works as long as it decides from equal data.
What ranks cannot know alike by themselves is agreed on here: times, which each clock measures for
itself, the attention of heads, of which a rank has a share, and what was sampled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


class Ranks:
    """The ranks that hold one model together, seen from one of them.

    Tensors on a GPU travel over NCCL and in the order of the stream; nothing waits for the device.

    Args:
        group: their process group on the host, None for a rank that is alone; all methods then
            hand back what they are given.
        on_device: SGLang's ``GroupCoordinator`` of the same ranks, for tensors on GPUs.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, on_device: Any = None) -> None:
        self._group = group
        self._on_device = on_device
        self.size = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)

    @classmethod
    def of_model(cls) -> Ranks:
        """The tensor-parallel ranks of this SGLang process."""
        if not dist.is_initialized():
            return cls()
        from sglang.srt.distributed import get_tp_group

        group = get_tp_group()
        return cls(group.cpu_group, group) if group.world_size > 1 else cls()

    @property
    def alone(self) -> bool:
        """Whether there is nobody to agree with."""
        return self._group is None

    def slowest(self, seconds: float) -> float:
        """The longest of all ranks' times: a step ends when the last rank is done."""
        if self.alone:
            return seconds
        longest = torch.tensor(seconds, dtype=torch.float64)
        dist.all_reduce(longest, dist.ReduceOp.MAX, group=self._group)
        return longest.item()

    def votes(self, scores: Tensor, reduction: str) -> Tensor:
        """Scores over the heads of all ranks, from each rank's scores over its own.

        May be captured in a CUDA graph where SGLang captures the model.

        Args:
            scores: contiguous float32, of tokens or of pages, written. With ``reduction`` ``"max"``
                the greatest score of any rank, otherwise the sum.
        """
        if self.alone:
            return scores
        how = dist.ReduceOp.MAX if reduction == "max" else dist.ReduceOp.SUM
        nccl = self._on_device.pynccl_comm if scores.is_cuda else None
        if nccl is not None and not nccl.disabled:
            # SGLang switches its own communicator on while it captures graphs, as for the model's
            # sums; outside of graphs they go through torch.distributed.
            nccl.all_reduce(scores, how)
        else:
            dist.all_reduce(scores, how, group=self._group_of(scores))
        return scores

    def first(self, values: Tensor) -> Tensor:
        """The first rank's values on every rank; ``values``, of one size on all, are written."""
        if not self.alone:
            dist.broadcast(values, group=self._group_of(values), group_src=0)
        return values

    def _group_of(self, values: Tensor) -> Any:
        return self._on_device.device_group if values.is_cuda else self._group

    def first_number(self, number: float) -> float:
        """The first rank's number on every rank."""
        if self.alone:
            return number
        return self.first(torch.tensor(number, dtype=torch.float64)).item()

    def from_first(self, make: Callable[[], T]) -> T:
        """What ``make`` returns on the first rank, where alone it is called; its exception is
        raised on every rank."""
        if self.alone:
            return make()
        told: list[Any] = [None, None]
        if self.rank == 0:
            try:
                told[0] = make()
            except Exception as fault:
                told[1] = fault
        dist.broadcast_object_list(told, group=self._group, group_src=0)
        if told[1] is not None:
            raise told[1]
        return told[0]

    def gather(self, values: list[int]) -> list[list[int]]:
        """Every rank's 64-bit integers, of one number on all, in the order of the ranks."""
        if self.alone:
            return [values]
        own = torch.tensor(values, dtype=torch.int64)
        everyone = torch.empty(self.size * len(values), dtype=torch.int64)
        dist.all_gather_into_tensor(everyone, own, group=self._group)
        return everyone.view(self.size, -1).tolist()
