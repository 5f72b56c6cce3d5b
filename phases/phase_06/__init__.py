"""Phase 6: paged memory.

Problem: a region is as long as the longest possible sequence, and a request is admitted only with KV cache for its
maximum output; most of it is never written. Idea: a KV cache in blocks of a few tokens, a block table for each request,
and blocks allocated as the output grows. Cost: keys and values are read through the table, and blocks can run out
during decoding; then the youngest request is preempted, and recomputed later.
"""
