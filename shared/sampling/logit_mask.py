"""The first logits processor: sets tokens that a grammar refuses to -inf. Introduced in phase 12."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray


@dataclass(frozen=True)
class LogitMaskProcessor:
    """Masks of some rows of logits ``[B, V]``; rows without a grammar are not touched.

    Attributes:
        rows: int64 ``[m]``, the rows that have a mask.
        allowed: bool ``[m, V]``, with at least one True in each row.
    """

    rows: torch.Tensor
    allowed: torch.Tensor

    @classmethod
    def of(cls, masks: Sequence[NDArray[np.bool_] | None]) -> Self | None:
        """The processor of the masks of B rows, on the CPU; None if no row has one."""
        rows = [row for row, mask in enumerate(masks) if mask is not None]
        if not rows:
            return None
        return cls(torch.tensor(rows), torch.from_numpy(np.stack([mask for mask in masks if mask is not None])))

    def sent(self, upload: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        """On another device."""
        return type(self)(upload(self.rows), upload(self.allowed))

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits ``[B, V]`` of any float dtype as float32, masked; the argument is not mutated."""
        masked = logits.to(torch.float32, copy=True)
        masked[self.rows] = masked[self.rows].masked_fill(~self.allowed, -torch.inf)
        return masked
