"""Phase 4: static batching.

Problem: to decode one token of one request, a GPU reads all weights and computes next to nothing with them. Idea: read
them once for many requests: lay their tokens end to end, each sequence with a region of memory of its own; a step
serves them all. Cost: memory is reserved for the longest answer that each may get; and the batch is closed, so short
answers leave their places empty, and a request that comes late waits for the longest.
"""
