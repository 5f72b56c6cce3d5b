"""Operations fused into Triton kernels, one file per kernel family: the kernel, then its launcher.

A launcher has the signature and the meaning of an op of ``shared.ops``, or of several after one another. On CPU
tensors it calls them; on GPU tensors it launches; with ``TRITON_INTERPRET=1`` in the environment it launches on the
CPU, through Triton's interpreter. There is no flag between.
"""
