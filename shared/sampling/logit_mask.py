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
        allowed: bool ``[k, V]``, the masks, with at least one True in each.
        numbers: int64 ``[m]``, the mask of each of these rows; several rows may share one.
    """

    rows: torch.Tensor
    allowed: torch.Tensor
    numbers: torch.Tensor

    @classmethod
    def of(cls, masks: Sequence[NDArray[np.bool_] | None]) -> Self | None:
        """The processor of the masks of B rows, on the CPU; None if no row has one."""
        different = {id(mask): mask for mask in masks if mask is not None}
        if not different:
            return None
        numbers = {key: number for number, key in enumerate(different)}
        rows = [row for row, mask in enumerate(masks) if mask is not None]
        allowed = torch.from_numpy(np.stack(list(different.values())))
        return cls(torch.tensor(rows), allowed, torch.tensor([numbers[id(masks[row])] for row in rows]))

    def sent(self, upload: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        """On another device."""
        return type(self)(upload(self.rows), upload(self.allowed), upload(self.numbers))

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits ``[B, V]`` of any float dtype as float32, masked; the argument is not mutated."""
        masked = logits.to(torch.float32, copy=True)
        masked[self.rows] = masked[self.rows].masked_fill(~self.allowed[self.numbers], -torch.inf)
        return masked
