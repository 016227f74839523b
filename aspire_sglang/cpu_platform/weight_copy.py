"""What the layouts of a linear's weight have in common."""

from __future__ import annotations

from torch import Tensor


class WeightCopy:
    """A copy of a weight in another layout, and which weight it is a copy of.

    Attributes:
        shape: ``(out_features, in_features)``.
        dtype: of the weight.
    """

    def __init__(self, weight: Tensor) -> None:
        self.shape = (weight.shape[0], weight.shape[1])
        self.dtype = weight.dtype
        self._pointer = weight.data_ptr()

    def matches(self, weight: Tensor) -> bool:
        """Whether ``weight`` is the storage that was copied (its content may have changed)."""
        return (
            weight.data_ptr() == self._pointer
            and weight.dtype == self.dtype
            and weight.shape == self.shape
        )

    def _check_input(self, x: Tensor) -> None:
        if x.dtype != self.dtype or x.shape[-1] != self.shape[1]:
            raise ValueError(f"input {x.dtype} {tuple(x.shape)} for {self.dtype} {self.shape}")
