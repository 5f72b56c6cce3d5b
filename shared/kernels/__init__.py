"""Operations fused into Triton kernels, one file per kernel family: the kernel, then its launcher.

A launcher has the signature and the meaning of an op of ``shared.ops``, or of a sequence of ops. On CPU tensors it
calls the ops; on GPU tensors it launches its kernel; with ``TRITON_INTERPRET=1`` in the environment it launches on the
CPU, through Triton's interpreter. No other flag selects the path.

Triton has no packages for macOS. There every launcher calls the ops, and code that needs a kernel reports
``NO_TRITON``.
"""

from importlib.util import find_spec

NO_TRITON = (
    "needs Triton, which is not installed and has no packages for macOS; it runs on Linux, also in a container"
    if find_spec("triton") is None
    else None
)
"""Why no kernel can run here; None if Triton is installed."""
