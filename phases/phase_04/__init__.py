"""Phase 4: static batching.

Problem: to decode one token of one request, a GPU reads all weights and computes almost nothing with them. Idea: read
them once for many requests: lay their tokens end to end, give each sequence its own region of the KV cache, and serve
all of them in a step. Cost: each region is reserved for the maximum length. The batch is closed, so finished requests
leave their rows empty, and a request that arrives late waits for the longest output.
"""
