"""Phase 3.1: Triton kernels.

Problem: one token's vectors are small, so on a GPU a layer of PyTorch operations is a row of launches that move
kilobytes each, and most of a token's time goes into asking for them. Idea: fuse. What reads the same input becomes one
matrix, norms and activations move into the products beside them, one launch writes keys and values, one attends. Cost:
kernels of our own to write, prove and tune; on a CPU nothing changes.
"""
