"""Lets the last program of a group to arrive reduce the results of the whole group. Introduced in phase 3.1.

Programs of one launch cannot wait for each other, but they can increment a counter: the program that arrives last does
the reduction. This saves the second launch that a reduction over several programs would need. The pattern is that of
CUDA's ``threadFenceReduction`` sample. Invariant: counters are zero between launches.
"""

import functools

import torch

from shared.kernels.launch import tl, triton

MAX_GROUPS = 1024
"""Maximum groups of programs in a launch of :func:`sum_of_parts`."""


@triton.jit
def is_last_arrival(counter, num_arrivals):
    """Count this program and return whether it is the last of ``num_arrivals``.

    The stores that other programs made before they arrived are then visible to loads that bypass the L1 cache
    (``.cg``). The barrier orders the stores of all threads before the one thread's atomic, which releases them and
    acquires those of the other programs. The last arrival resets the counter.
    """
    tl.debug_barrier()
    is_last = tl.atomic_add(counter, 1, sem="acq_rel") == num_arrivals - 1
    if is_last:
        tl.store(counter, 0)
    return is_last


@triton.jit
def sum_of_parts(y, up, partial, counters, block, split, SPLITS: tl.constexpr, ACTIVATION: tl.constexpr):
    """The sums ``[BLOCK_N, BLOCK_M]`` over all parts of K, and whether this program has them, being the last to
    arrive."""
    is_last = True
    if SPLITS > 1:
        BLOCK_N: tl.constexpr = y.shape[0]
        BLOCK_M: tl.constexpr = y.shape[1]
        SIZE: tl.constexpr = BLOCK_N * BLOCK_M
        KINDS: tl.constexpr = 1 if ACTIVATION is None else 2
        at = block * (SPLITS * KINDS * SIZE) + tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
        tl.store(partial + at + split * KINDS * SIZE, y)
        if ACTIVATION is not None:
            tl.store(partial + at + (split * KINDS + 1) * SIZE, up)
        is_last = is_last_arrival(counters + block, SPLITS)
        if is_last:
            y = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            for part in tl.static_range(SPLITS):
                y += tl.load(partial + at + part * KINDS * SIZE, cache_modifier=".cg")
                if ACTIVATION is not None:
                    up += tl.load(partial + at + (part * KINDS + 1) * SIZE, cache_modifier=".cg")
    return y, up, is_last


def memory_of_parts(
    splits: int, num_groups: int, size: int, device: torch.device
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """What :func:`sum_of_parts` writes: ``size`` elements per program, and one counter per group; None for one part.

    Counters are zero between launches, so one array serves all on a stream. An engine runs a step before it captures
    it, so the array is never allocated during a capture. Raises ValueError for more groups than ``MAX_GROUPS``.
    """
    if splits == 1:
        return None, None
    if num_groups > MAX_GROUPS:
        raise ValueError(f"{num_groups} groups of programs add up parts; they are at most {MAX_GROUPS}")
    return torch.empty(splits * num_groups * size, device=device), _counters(device)


@functools.cache
def _counters(device: torch.device) -> torch.Tensor:
    return torch.zeros(MAX_GROUPS, dtype=torch.int32, device=device)
