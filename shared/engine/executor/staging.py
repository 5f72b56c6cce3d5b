"""Uploads a step's small arrays to the device in one copy. Introduced in phase 4.

A step's inputs (ids, positions, slot mapping) are numpy arrays on the host. Copying each array by itself would cost one
synchronous copy per array. Instead every array has a fixed range, sized for its maximum length, in a pinned host buffer
and in a device buffer of the same layout. Two pinned buffers alternate, so the host can write a step while the copy of
the previous one waits for a forward to finish. On a CPU the host buffer and the device buffer are the same.

Invariants: an array has the same device address in every step, whatever its length, as CUDA graphs require; nothing is
allocated after construction; a pinned buffer is not written while its copy is pending.
"""

from collections.abc import Mapping
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray

ALIGNMENT = 256  # bytes; no kernel's widest vector load needs more
NUM_BUFFERS = 2
MOST_KEPT = 4096  # cached slices


class Staging:
    """Fixed buffers for named arrays.

    Args:
        ranges: maximum length and dtype of each array, in the order of the buffer. A copy ends after the last array
            that is sent, so put long arrays that are rarely full last.
    """

    def __init__(self, device: torch.device, ranges: Mapping[str, tuple[int, DTypeLike]]) -> None:
        self.regions: dict[str, tuple[int, int, np.dtype[Any]]] = {}  # first byte, length, dtype
        total = 0
        for name, (count, dtype) in ranges.items():
            dtype = np.dtype(dtype)
            self.regions[name] = total, count, dtype
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
        self.sent: dict[tuple[str, int], torch.Tensor] = {}  # keyed by length: a lookup is faster than slicing a tensor

    @classmethod
    def for_arrays(cls, device: torch.device, arrays: Mapping[str, NDArray[Any]]) -> Self:
        """Buffers for arrays of these lengths and dtypes."""
        return cls(device, {name: (len(array), array.dtype) for name, array in arrays.items()})

    def send(self, arrays: Mapping[str, NDArray[Any]]) -> dict[str, torch.Tensor]:
        """Copy the arrays to the device in the dtype of their ranges; overwrites the tensors of the previous call.

        Waits only for the copy before the previous one. Raises ValueError for an array longer than its range.
        """
        self.turn = (self.turn + 1) % len(self.buffers)
        if self.is_copying:
            self.copied[self.turn].synchronize()
        host, end = self.hosts[self.turn], 0
        for name, array in arrays.items():
            begin, capacity, dtype = self.regions[name]
            if len(array) > capacity:
                raise ValueError(f"{name} has {len(array)} numbers, and there is space for {capacity}")
            host[name][: len(array)] = array
            end = max(end, begin + len(array) * dtype.itemsize)
        if self.is_copying:
            self.arrived[:end].copy_(self.buffers[self.turn][:end], non_blocking=True)
            record(self.copied[self.turn], self.arrived.get_device())
        return {name: self._sent(name, len(array)) for name, array in arrays.items()}

    def _sent(self, name: str, count: int) -> torch.Tensor:
        """The first ``count`` elements of an array on the device."""
        tensor = self.sent.get((name, count))
        if tensor is None:
            if len(self.sent) == MOST_KEPT:
                self.sent.clear()
            tensor = self.sent[name, count] = self.tensors[name][:count]
        return tensor

    def _cut(self, buffer: Any) -> dict[str, Any]:
        """The ranges of a byte buffer, each in its dtype."""
        return {
            name: buffer[begin : begin + count * dtype.itemsize].view(
                dtype if isinstance(buffer, np.ndarray) else _DTYPES[dtype]
            )
            for name, (begin, count, dtype) in self.regions.items()
        }


_STREAMS: dict[tuple[int, int], torch.cuda.Stream] = {}  # by GPU and handle


def record(event: torch.cuda.Event, device: int) -> None:
    """``event.record()`` on the current stream of a GPU, without PyTorch's slow lookup of that stream."""
    key = device, torch._C._cuda_getCurrentRawStream(device)
    stream = _STREAMS.get(key)
    if stream is None:
        stream = _STREAMS[key] = torch.cuda.current_stream(device)
    event.record(stream)


def upload(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a tensor of any length to the device through pinned memory, without waiting."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


_DTYPES = {
    np.dtype(np.int64): torch.int64,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.float64): torch.float64,
}
