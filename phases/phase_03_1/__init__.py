"""Phase 3.1: Triton kernels.

Problem: one token's vectors are small, so on a GPU a layer of PyTorch operations is a sequence of launches that move
kilobytes each, and most of a token's time is launch overhead. Idea: fuse. Matrices that read the same input are merged,
norms and activations move into adjacent products, one launch writes keys and values, one attends. Cost: custom kernels
to write, verify and tune; on a CPU nothing changes.
"""
