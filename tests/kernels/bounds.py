"""In Triton's interpreter: a kernel reads and writes only the tensors that it was given.

A GPU takes a wrong address silently wherever memory happens to be mapped, and otherwise ends the process at some later
call. The interpreter knows each address when it is used.
"""

from itertools import chain
from typing import Any

import numpy as np
import torch

REACHABLE: list[torch.Tensor] = []
"""Memory that kernels reach by addresses in a tensor, such as that of other ranks."""


class Bounds:
    """The addresses that the kernel being interpreted may use."""

    def __init__(self) -> None:
        self.kernel, self.begins, self.ends = "", np.zeros(0, np.uint64), np.zeros(0, np.uint64)

    def enter(self, kernel: str, tensors: list[torch.Tensor]) -> None:
        """A kernel begins, with these tensors."""
        places = sorted((each.data_ptr(), each.data_ptr() + extent(each)) for each in tensors if each.numel())
        joined: list[tuple[int, int]] = []
        for begin, end in places:
            if joined and begin <= joined[-1][1]:  # views of the same memory
                joined[-1] = joined[-1][0], max(end, joined[-1][1])
            else:
                joined.append((begin, end))
        self.kernel = kernel
        self.begins, self.ends = np.array(joined, np.uint64).reshape(-1, 2).T

    def check(self, what: str, pointers: Any, mask: Any = None) -> None:
        """Raises IndexError if a pointer that the mask leaves points beside all tensors."""
        addresses = pointers.data
        if mask is not None:  # of booleans, or of integers
            addresses = addresses[np.broadcast_to(mask.data, addresses.shape).astype(bool)]
        if not addresses.size:
            return
        at = np.searchsorted(self.begins, addresses, side="right") - 1
        size = np.uint64(pointers.get_element_ty().primitive_bitwidth // 8)
        is_outside = (at < 0) | (addresses + size > self.ends[at])
        if is_outside.any():
            raise IndexError(
                f"{self.kernel} {what} {is_outside.sum()} of {addresses.size} addresses beside its tensors"
            )


def extent(tensor: torch.Tensor) -> int:
    """Bytes from the first to the last element."""
    return tensor.element_size() * (
        1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    )


def check_accesses() -> None:
    """Check each access of a kernel from here on."""
    from triton.runtime import interpreter

    bounds, builder, executor = Bounds(), interpreter.InterpreterBuilder, interpreter.GridExecutor
    begin, load, store = executor._init_args_hst, builder.create_masked_load, builder.create_masked_store
    swap, update = builder.create_atomic_cas, builder.create_atomic_rmw

    def begin_checked(self: Any, *args: Any) -> Any:
        on_host = begin(self, *args)
        given = [getattr(each, "base", each) for each in chain(on_host[0], on_host[1].values())]  # of a descriptor
        bounds.enter(self.fn.__name__, [*REACHABLE, *(each for each in given if isinstance(each, torch.Tensor))])
        return on_host

    def load_checked(self: Any, pointers: Any, mask: Any, *args: Any, **options: Any) -> Any:
        bounds.check("reads", pointers, mask)
        return load(self, pointers, mask, *args, **options)

    def store_checked(self: Any, pointers: Any, value: Any, mask: Any, *args: Any) -> Any:
        bounds.check("writes", pointers, mask)
        return store(self, pointers, value, mask, *args)

    def swap_checked(self: Any, pointers: Any, *args: Any) -> Any:
        bounds.check("swaps", pointers)
        return swap(self, pointers, *args)

    def update_checked(self: Any, operation: Any, pointers: Any, value: Any, mask: Any, *args: Any) -> Any:
        bounds.check("updates", pointers, mask)
        return update(self, operation, pointers, value, mask, *args)

    executor._init_args_hst = begin_checked
    builder.create_masked_load, builder.create_masked_store = load_checked, store_checked
    builder.create_atomic_cas, builder.create_atomic_rmw = swap_checked, update_checked
