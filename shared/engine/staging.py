"""A step's small arrays on their way to the device, all in one copy. Introduced in phase 4.

A step is planned in numpy on the host, and a GPU needs to know the plan: ids, positions, places. Each array sent by
itself would cost a copy that the host waits for. Here they are laid one behind the other in pinned memory, which the
GPU can read while the host goes on, and arrive in one piece of device memory, of which each array is a view. On a CPU
nothing is copied.

Invariants: arrays of the same sizes arrive at the same addresses every time, which a CUDA graph relies on; memory that
is on its way is not written.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

ALIGNMENT = 16  # bytes; what a vector load of a kernel wants
SMALLEST = 1 << 16


class Staging:
    """Pinned memory and its twin on the device; they grow to the largest plan that was sent."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.capacity = 0
        self.copied = torch.cuda.Event() if device.type == "cuda" else None

    def send(self, arrays: Sequence[NDArray[Any]]) -> list[torch.Tensor]:
        """The arrays, each contiguous, as tensors on the device; those of the last call are overwritten."""
        if self.copied is None:
            return [torch.from_numpy(array) for array in arrays]
        starts, total = [], 0
        for array in arrays:
            starts.append(total)
            total += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
        if total > self.capacity:
            self._grow(total)
        self.copied.synchronize()  # the last plan has left
        for start, array in zip(starts, arrays, strict=True):
            self.bytes[start : start + array.nbytes] = array.view(np.uint8)
        self.arrived[:total].copy_(self.pinned[:total], non_blocking=True)
        self.copied.record()
        return [
            self.arrived[start : start + array.nbytes].view(_DTYPES[array.dtype])
            for start, array in zip(starts, arrays, strict=True)
        ]

    def _grow(self, num_bytes: int) -> None:
        self.capacity = max(SMALLEST, 1 << (num_bytes - 1).bit_length())
        self.pinned = torch.empty(self.capacity, dtype=torch.uint8, pin_memory=True)
        self.bytes = self.pinned.numpy()
        self.arrived = torch.empty(self.capacity, dtype=torch.uint8, device=self.device)


_DTYPES = {
    np.dtype(np.int64): torch.int64,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.float64): torch.float64,
}
