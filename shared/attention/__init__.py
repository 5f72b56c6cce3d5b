"""Split-KV attention: plans of parallel splits, and merging of their results. Introduced in phase 6.1.

``descriptor`` defines a plan; ``plan`` assigns keys to programs, once a step, on the host; ``states`` defines the
result of attention over a split, and why every split size gives the same result. The kernels are in ``shared.kernels``.
"""
