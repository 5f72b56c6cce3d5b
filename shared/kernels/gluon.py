"""What kernels in Gluon import, and whether the installed Triton has the version that they were written for. Introduced
in phase 3.1.

Gluon is the language below Triton's, in which layouts, barriers and asynchronous operations are explicit. It comes with
Triton as an experiment whose names change between versions, so its kernels run only with the versions named here, and
never in Triton's interpreter. Invariant: a file that imports from here can be imported everywhere; :data:`HAS_GLUON`
says whether its kernels run.
"""

import functools
from types import SimpleNamespace
from typing import Any

import torch

from shared.kernels.launch import DESCRIPTORS, INTERPRETED

try:
    import triton
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.hopper import (
        fence_async_shared,
        mbarrier,
        tma,
        warpgroup_mma,
        warpgroup_mma_init,
        warpgroup_mma_wait,
    )
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor

    HAS_GLUON = not INTERPRETED and triton.__version__.startswith("3.6.")
    DESCRIPTORS.add(GluonDescriptor)
except ImportError:
    HAS_GLUON = False
    gluon = SimpleNamespace(jit=lambda kernel=None, **_: kernel or (lambda decorated: decorated))
    gl = SimpleNamespace(constexpr=lambda value: value)
    fence_async_shared = mbarrier = tma = GluonDescriptor = None
    warpgroup_mma = warpgroup_mma_init = warpgroup_mma_wait = None

__all__ = [
    *("COMPUTING", "HAS_GLUON", "LOADING", "REGISTERS", "GluonDescriptor", "barriers", "descriptor"),
    *("fence_async_shared", "gl", "gluon", "mbarrier", "tma"),
    *("warpgroup_mma", "warpgroup_mma_init", "warpgroup_mma_wait"),
]

REGISTERS = 168
"""Registers per thread at launch of a program in which two groups of four warps compute and one warp loads: those of a
multiprocessor, divided among 12 warps. Four of them are allotted to the one that loads, which then releases most of its
registers to the others."""
COMPUTING, LOADING = gl.constexpr(240), gl.constexpr(24)  # registers per thread from then on


@gluon.jit
def barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """COUNT barriers, each of which completes a phase after ARRIVALS arrivals."""
    made = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for n in gl.static_range(COUNT):
        mbarrier.init(made.index(n), count=ARRIVALS)
    return made


def descriptor(matrix: Any, tile: list[int]) -> Any:
    """Describes ``matrix`` to the engine that copies tiles of it into shared memory, as the tensor cores read them."""
    return GluonDescriptor.from_tensor(matrix, tile, _layout(*tile, dtype=matrix.dtype))


@functools.cache  # it takes longer than a launch
def _layout(*tile: int, dtype: torch.dtype) -> Any:
    return gl.NVMMASharedLayout.get_default_for(list(tile), getattr(gl, str(dtype).removeprefix("torch.")))
