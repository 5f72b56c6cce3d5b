"""What ranks compute together: sums, gathered parts, broadcasts. Introduced in phase 12.1.

On CPUs through gloo, on GPUs through NCCL; groups are objects, so a process may have several. All calls are collective:
each rank makes the same ones in the same order. On a GPU they are launched on the current stream and can be captured.

Invariant: a sum over CPUs is added in the order of the ranks, so all ranks have the same, and have it again in the next
run. NCCL adds in an order of its own, which is the same in each run of one configuration.
"""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

gloo: Any = dist.ProcessGroupGloo
NCCL_SETTINGS = {
    "NCCL_NVLS_ENABLE": "0",  # multicast, which not every machine lets processes use
    "NCCL_SOCKET_IFNAME": "lo",  # the ranks are of one machine
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # PyTorch's own watch would end the engine's process
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}
MEETING = timedelta(seconds=60)
"""Within this the ranks must have connected to each other, on CPUs."""
NEVER = timedelta(days=1)
"""Collectives have no time limit: :mod:`shared.parallel.watch` ends a group that makes no progress."""


class PeerError(RuntimeError):
    """A collective has failed: another rank has gone."""


class Collectives:
    """Rank ``rank`` of the ``size`` ranks that meet at ``store``.

    Args:
        device: of the tensors; a CPU or a GPU of this rank alone.
        count: called at the beginning and at the end of each collective.
        waiting: within it, the other ranks are waited for.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        device: torch.device,
        count: Callable[[], None] = lambda: None,
        waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.rank, self.size, self.device = rank, size, device
        self.count, self.waiting = count, waiting
        if device.type == "cuda":
            for name, value in NCCL_SETTINGS.items():
                os.environ.setdefault(name, value)
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = NEVER
            self.group: Any = dist.ProcessGroupNCCL(store, rank, size, options)
        else:
            options = gloo._Options()
            options._devices = [gloo.create_device(hostname="127.0.0.1")]
            options._timeout = MEETING
            self.group = gloo(store, rank, size, options)
            self.group._set_default_timeout(NEVER)

    def all_sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks, of ``x``'s shape and dtype, on every rank; ``x`` may be overwritten."""
        if self.device.type == "cuda":
            self._run(self.group.allreduce, [x])
            return x
        total = (parts := self.gathered(x).unbind())[0].float()
        for part in parts[1:]:
            total = total + part
        return total.to(x.dtype)

    def gathered(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` of every rank, ``[size, *x.shape]``, on every rank; the shapes must be equal."""
        x = x.contiguous()
        parts = torch.empty(self.size, *x.shape, dtype=x.dtype, device=x.device)
        if self.device.type == "cuda":
            self._run(self.group._allgather_base, parts, x)
        elif x.numel():
            pieces = list(parts.view(self.size, -1).view(torch.uint8).unbind())  # gloo does not know every dtype
            self._run(self.group.allgather, [pieces], [x.view(-1).view(torch.uint8)])
        return parts

    def broadcast(self, x: torch.Tensor) -> None:
        """Overwrite ``x`` with that of rank 0."""
        self._run(self.group.broadcast, [x])

    def least(self, number: int) -> int:
        """The smallest of the ranks' numbers; waits for it."""
        return int(self.gathered(torch.tensor([number], device=self.device)).min())

    def abort(self) -> None:
        """End collectives on GPUs that wait for a rank; on CPUs they raise when the rank's process has ended."""
        if self.device.type == "cuda":
            self.group.abort()

    def _run(self, collective: Callable[..., Any], *tensors: Any) -> None:
        self.count()
        try:
            with self.waiting():
                collective(*tensors).wait()
        except RuntimeError as error:
            raise PeerError(str(error)) from error
        self.count()
