"""Operations fused into Triton kernels, one file per kernel family: the kernel, then its launcher.

A launcher has the signature and the meaning of an op of ``shared.ops``, or of a sequence of ops. On CPU tensors it
calls the ops; on GPU tensors it launches its kernel; with ``TRITON_INTERPRET=1`` in the environment it launches on the
CPU, through Triton's interpreter. No other flag selects the path.
"""
