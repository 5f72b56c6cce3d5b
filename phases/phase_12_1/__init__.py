"""Phase 12.1: tensor parallelism.

Problem: a model too large for one GPU, or too slow, because each token reads all of its weights. Idea: every matrix is
cut, each GPU has a part, and two sums a layer make the parts one model again. Cost: a process for each GPU, and the
time of the sums, in which no GPU computes.
"""
