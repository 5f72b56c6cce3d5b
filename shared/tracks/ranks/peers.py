"""Memory on each rank's GPU that all ranks' GPUs write and read. Introduced in phase 12.1.

Invariant: either all ranks have it or none does; if one way of sharing memory fails on a machine, all ranks use
another.
"""

import logging
import pickle
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shared.tracks.ranks.kernels.all_reduce import CHANNELS, num_words

PATIENCE = timedelta(seconds=4)
"""Time within which all ranks, which have met before, must have answered; if one is lost, two answers are awaited."""
_log = logging.getLogger("infer.engine")
# PyTorch's registry does not keep them, and it counts their rendezvous per process
_groups: list[dist.ProcessGroup] = []


class PeerMemory:
    """The memory of rank ``rank`` of the ``size`` ranks that meet at ``store``; see
    ``shared.tracks.ranks.kernels.all_reduce``.

    Raises RuntimeError if the ranks cannot share memory.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, device: torch.device) -> None:
        self.rank, self.size, before = rank, size, getattr(store, "timeout", 6 * PATIENCE)
        store.set_timeout(PATIENCE)
        try:
            self.way, self.memory, addresses, self.kept = shared_memory(store, rank, size, device)
            self.addresses = torch.tensor(addresses, device=device)
            self.counters = torch.zeros(CHANNELS, dtype=torch.int32, device=device)
            self.stop = torch.zeros(1, dtype=torch.int32, device=device)
            self._one = torch.ones(1, dtype=torch.int32).pin_memory()
            self._stream = torch.cuda.Stream(device)
            self.memory.fill_(-1)  # the state in which nothing has been sent
            torch.cuda.synchronize(device)
            all_agree(dist.PrefixStore("cleared memory", store), rank, size)
        finally:
            store.set_timeout(before)

    def end(self) -> None:
        """End all waits for other ranks on this GPU. The copy needs no multiprocessor, since all of them may be
        waiting."""
        with torch.cuda.stream(self._stream):
            self.stop.copy_(self._one, non_blocking=True)


def shared_memory(
    store: dist.Store, rank: int, size: int, device: torch.device
) -> tuple[str, Tensor, list[int], list[object]]:
    """The first method that works on all ranks, with its result."""
    for way, share in WAYS.items():
        try:
            found = share(dist.PrefixStore(way, store), rank, size, device)
        except Exception as error:
            _log.info("rank %d has no %s memory: %s", rank, way, error, exc_info=error)
            found = None
        if all_agree(dist.PrefixStore(f"{way} memory", store), rank, size, int(found is not None)) and found:
            return way, *found
    raise RuntimeError("the GPUs of the ranks cannot share memory")


def symmetric(store: dist.Store, rank: int, size: int, device: torch.device) -> tuple[Tensor, list[int], list[object]]:
    """This rank's memory and the addresses of all, from PyTorch's symmetric memory, which needs a named group."""
    from torch._C._distributed_c10d import _register_process_group, _SymmetricMemory

    if not all_agree(dist.PrefixStore("number", store), rank, size, len(_groups)):
        raise RuntimeError("not all processes of the ranks have had as many groups, which PyTorch counts")
    group = dist.ProcessGroup(store, rank, size)
    name: Any = f"peers {len(_groups)}"
    _register_process_group(name, group)
    _groups.append(group)
    _SymmetricMemory.set_group_info(name, rank, size, store)  # only versions before 2.11 take the store
    memory = _SymmetricMemory.empty_strided_p2p((num_words(size),), (1,), torch.int32, device, name)
    handle = _SymmetricMemory.rendezvous(memory, name)
    return memory, list(handle.buffer_ptrs), [handle]


def mapped(store: dist.Store, rank: int, size: int, device: torch.device) -> tuple[Tensor, list[int], list[object]]:
    """The same through CUDA's memory handles: each process maps the others' memory on its own GPU."""
    memory = torch.empty(num_words(size), dtype=torch.int32, device=device)
    store.set(f"memory {rank}", pickle.dumps(memory.untyped_storage()._share_cuda_()).hex())
    storages = [memory.untyped_storage()] * size
    for peer in range(size):
        if peer != rank:
            _, *arguments = pickle.loads(bytes.fromhex(store.get(f"memory {peer}").decode()))
            arguments[-1] = False  # there is no event to wait for: the memory already exists
            storages[peer] = torch.UntypedStorage._new_shared_cuda(device.index, *arguments)
    return memory, [storage.data_ptr() for storage in storages], list(storages)


WAYS = {"symmetric": symmetric, "mapped": mapped}


def all_agree(store: dist.Store, rank: int, size: int, said: int = 1) -> bool:
    """Whether all ranks answer yes; waits for their answers."""
    store.set(f"rank {rank}", str(said))
    return len({store.get(f"rank {peer}") for peer in range(size)}) == 1
