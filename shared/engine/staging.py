"""A step's small arrays on their way to the device, all in one copy. Introduced in phase 4.

A step is planned in numpy on the host, and a GPU needs to know the plan: ids, positions, places. Each array sent by
itself would cost a copy that the host waits for. Here every array has a place of its own, with room for the longest
that a step can bring; the places lie one behind the other in pinned memory, which the GPU can read while the host goes
on, and in a twin on the device. There are two pinned buffers, taken in turn, so that a plan can be written while the
one before waits on the stream behind a forward. On a CPU buffer and twin are one.

Invariants: an array arrives at the same address in every step, whatever its length, which a CUDA graph relies on;
nothing is allocated after the start; memory that is on its way is not written.
"""

from collections.abc import Mapping
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray

ALIGNMENT = 256  # bytes; more than a vector load of a kernel wants
NUM_BUFFERS = 2
MOST_KEPT = 4096  # tensors that were cut


class Staging:
    """Places for named arrays.

    Args:
        places: of each array the most numbers and their dtype, in the order in which they lie. A copy ends with the
            last array that is sent, so what is long and rarely full stands last.
    """

    def __init__(self, device: torch.device, places: Mapping[str, tuple[int, DTypeLike]]) -> None:
        self.rooms: dict[str, tuple[int, int, np.dtype[Any]]] = {}  # where each begins, how many numbers, which
        total = 0
        for name, (count, dtype) in places.items():
            dtype = np.dtype(dtype)
            self.rooms[name] = total, count, dtype
            total += -(-count * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        self.arrived = torch.empty(total, dtype=torch.uint8, device=device)
        self.is_copying = device.type == "cuda"
        self.buffers = [
            torch.empty(total, dtype=torch.uint8, pin_memory=True) if self.is_copying else self.arrived
            for _ in range(NUM_BUFFERS if self.is_copying else 1)
        ]
        self.copied = [torch.cuda.Event() for _ in self.buffers] if self.is_copying else []
        self.hosts = [self._cut(buffer.numpy()) for buffer in self.buffers]
        self.tensors = self._cut(self.arrived)
        self.turn = 0
        self.sent: dict[tuple[str, int], torch.Tensor] = {}  # of each length: to cut a tensor takes longer than a look

    @classmethod
    def for_arrays(cls, device: torch.device, arrays: Mapping[str, NDArray[Any]]) -> Self:
        """Places for arrays of these lengths and dtypes."""
        return cls(device, {name: (len(array), array.dtype) for name, array in arrays.items()})

    def send(self, arrays: Mapping[str, NDArray[Any]]) -> dict[str, torch.Tensor]:
        """The arrays as tensors on the device, in the dtype of their places; those of the last call are overwritten.

        Waits only for the copy before the last. Raises ValueError for an array that its place has no room for.
        """
        self.turn = (self.turn + 1) % len(self.buffers)
        if self.is_copying:
            self.copied[self.turn].synchronize()
        host, end = self.hosts[self.turn], 0
        for name, array in arrays.items():
            begin, room, dtype = self.rooms[name]
            if len(array) > room:
                raise ValueError(f"{name} has {len(array)} numbers, and there is room for {room}")
            host[name][: len(array)] = array
            end = max(end, begin + len(array) * dtype.itemsize)
        if self.is_copying:
            self.arrived[:end].copy_(self.buffers[self.turn][:end], non_blocking=True)
            self.copied[self.turn].record()
        return {name: self._sent(name, len(array)) for name, array in arrays.items()}

    def _sent(self, name: str, count: int) -> torch.Tensor:
        """The first numbers of a place on the device."""
        tensor = self.sent.get((name, count))
        if tensor is None:
            if len(self.sent) == MOST_KEPT:
                self.sent.clear()
            tensor = self.sent[name, count] = self.tensors[name][:count]
        return tensor

    def _cut(self, buffer: Any) -> dict[str, Any]:
        """The places in a buffer of bytes, each in its dtype."""
        return {
            name: buffer[begin : begin + count * dtype.itemsize].view(
                dtype if isinstance(buffer, np.ndarray) else _DTYPES[dtype]
            )
            for name, (begin, count, dtype) in self.rooms.items()
        }


_DTYPES = {
    np.dtype(np.int64): torch.int64,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.float64): torch.float64,
}
