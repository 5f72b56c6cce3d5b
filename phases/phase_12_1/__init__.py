"""Phase 12.1: tensor parallelism.

Problem: a model may be too large for one GPU, or too slow, because each token reads all of its weights. Idea: every
matrix is sharded over the GPUs, and two sums per layer combine the shards' results. Cost: a process for each GPU, and
the time of the sums, during which no GPU computes.
"""
