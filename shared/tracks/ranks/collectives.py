"""What ranks compute together: sums, gathers, broadcasts. Introduced in phase 12.1.

On CPUs through gloo; on GPUs through NCCL, small sums through our own kernel and memory that the GPUs share. Groups are
objects, so a process may be in several. All calls are collective: every rank makes the same calls in the same order. On
a GPU they are launched on the current stream and can be captured.

Invariant: gloo and the kernel add in the order of the ranks, so all ranks get the same result in every run. NCCL adds
in its own order, which is the same in each run of one configuration.
"""

import logging
import math
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions

from shared.tracks.ranks.kernels.all_reduce import all_reduce, fits
from shared.tracks.ranks.peers import PeerMemory

gloo: Any = dist.ProcessGroupGloo
NCCL_SETTINGS = {
    "NCCL_NVLS_ENABLE": "0",  # multicast, which some machines do not permit
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NCCL_SOCKET_IFNAME": "lo",  # all ranks are on one machine
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # otherwise PyTorch's own watchdog would end the engine's process
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}
MEETING = timedelta(seconds=8)
"""Time within which the ranks, all of which have started, must have connected to each other, on CPUs."""
NEVER = timedelta(days=1)
"""Collectives have no time limit: :mod:`shared.tracks.ranks.watch` ends a group that makes no progress."""


MOST_BYTES = 2 << 20
"""Maximum bytes that a rank writes in a one-shot sum, including its own part; NCCL sums larger tensors."""
_log = logging.getLogger("infer.engine")


class PeerError(RuntimeError):
    """A collective has failed: another rank is gone."""


class Collectives:
    """Rank ``rank`` of the ``size`` ranks that meet at ``store``.

    Args:
        device: the device of the tensors: a CPU, or a GPU that only this rank uses.
        count: called at the start and end of each collective.
        waiting: a context in which this rank waits for the others; takes an optional patience in seconds.
        is_shared: whether GPUs share memory, for small sums; if they cannot, this is logged, and NCCL adds everything.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        device: torch.device,
        count: Callable[[], None] = lambda: None,
        waiting: Callable[..., AbstractContextManager[Any]] = nullcontext,
        is_shared: bool = True,
    ) -> None:
        self.rank, self.size, self.device = rank, size, device
        self.count, self.waiting = count, waiting
        self.peers: PeerMemory | None = None
        if device.type == "cuda":
            for name, value in NCCL_SETTINGS.items():
                os.environ.setdefault(name, value)
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = NEVER
            self.group: Any = dist.ProcessGroupNCCL(store, rank, size, options)
            self.options = [kind() for kind in (dist.AllreduceOptions, AllgatherOptions, dist.BroadcastOptions)]
            for option in self.options:
                option.asyncOp = False  # on the current stream
            if is_shared:
                try:
                    with self.waiting(math.inf):  # which has its own time limit
                        self.peers = PeerMemory(store, rank, size, device)
                except RuntimeError as error:
                    _log.warning("NCCL adds small sums too: %s", error)
        else:
            self.options = []
            options = gloo._Options()
            options._devices = [gloo.create_device(hostname="127.0.0.1")]
            options._timeout = MEETING
            self.count()
            with self.waiting(0.8 * MEETING.total_seconds()):  # the watch names the missing rank before gloo gives up
                self.group = gloo(store, rank, size, options)
            self.count()
            self.group._set_default_timeout(NEVER)

    def all_sum(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """The sum over the ranks of ``x`` ``[T, n]``, and ``residual``, on every rank; ``x`` may be overwritten."""
        if self.peers is not None and x.nbytes * self.size <= MOST_BYTES and fits(x):
            self.count()
            with self.waiting():
                total = all_reduce(x, self.peers, residual)
            self.count()
            return total
        if self.device.type == "cuda":
            self._run(self.group.allreduce, [x], self.options[0])
            return x if residual is None else residual + x
        total = (parts := self.gathered(x).unbind())[0].float()
        for part in parts[1:]:
            total = total + part
        total = total.to(x.dtype)
        return total if residual is None else residual + total

    def gathered(self, x: Tensor) -> Tensor:
        """``x`` of every rank, ``[size, *x.shape]``, on every rank; the shapes must be equal."""
        x = x.contiguous()
        parts = torch.empty(self.size, *x.shape, dtype=x.dtype, device=x.device)
        if self.device.type == "cuda":
            self._run(self.group._allgather_base, parts, x, self.options[1])
        elif x.numel():
            pieces = list(parts.view(self.size, -1).view(torch.uint8).unbind())  # gloo does not support every dtype
            self._run(self.group.allgather, [pieces], [x.view(-1).view(torch.uint8)])
        return parts

    def broadcast(self, x: Tensor) -> None:
        """Overwrite ``x`` with rank 0's."""
        self._run(self.group.broadcast, [x], *self.options[2:])

    def least(self, number: int) -> int:
        """The smallest of the ranks' numbers; waits for it."""
        return int(self.gathered(torch.tensor([number], device=self.device)).min())

    def abort(self) -> None:
        """Abort GPU collectives that wait for a rank; on CPUs they raise once the rank's process has ended."""
        if self.peers is not None:
            self.peers.end()
        if self.device.type == "cuda":
            self.group.abort()

    def _run(self, collective: Callable[..., Any], *tensors: Any) -> None:
        self.count()
        try:
            with self.waiting():
                work = collective(*tensors)
                if work is not None:  # NCCL returns no work object for operations on the current stream
                    work.wait()
        except RuntimeError as error:
            raise PeerError(str(error)) from error
        self.count()
