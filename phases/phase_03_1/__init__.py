"""Phase 3.1: Triton kernels.

Problem: one token's vectors are small, so on a GPU a layer of PyTorch operations is a sequence of launches that move
kilobytes each, and most of a token's time is launch overhead. Idea: fuse. Matrices that read the same input are merged,
norms and activations move into adjacent products, one launch writes keys and values, and one attends. Cost: custom
kernels must be written, verified and tuned; on a CPU nothing changes.
"""
