"""What kernels in Gluon import, and whether the installed Triton has the version that they were written for. Introduced
in phase 6.1.

Gluon is the language below Triton's, in which layouts, barriers and asynchronous operations are explicit. It comes with
Triton as an experiment whose names change between versions, so its kernels run only with the versions named here.
Invariant: a file that imports from here can be imported everywhere; :data:`HAS_GLUON` says whether its kernels run.
"""

from types import SimpleNamespace
from typing import Any

from shared.kernels.launch import DESCRIPTORS

try:
    import triton
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.hopper import (
        fence_async_shared,
        mbarrier,
        tma,
        warpgroup_mma,
        warpgroup_mma_wait,
    )
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor

    HAS_GLUON = triton.__version__.startswith("3.6.")
    DESCRIPTORS.add(GluonDescriptor)
except ImportError:
    HAS_GLUON = False
    gluon = SimpleNamespace(jit=lambda kernel: kernel)
    gl = SimpleNamespace(constexpr=lambda value: value)
    fence_async_shared = mbarrier = tma = warpgroup_mma = warpgroup_mma_wait = GluonDescriptor = None

__all__ = [
    *("HAS_GLUON", "GluonDescriptor", "descriptor", "fence_async_shared", "gl", "gluon", "mbarrier", "tma"),
    *("warpgroup_mma", "warpgroup_mma_wait"),
]


def descriptor(matrix: Any, tile: list[int]) -> Any:
    """Describes ``matrix`` to the engine that copies tiles of it into shared memory, as the tensor cores read them."""
    layout = gl.NVMMASharedLayout.get_default_for(tile, getattr(gl, str(matrix.dtype).removeprefix("torch.")))
    return GluonDescriptor.from_tensor(matrix, tile, layout)
