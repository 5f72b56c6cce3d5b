"""Phase 6: paged memory.

Problem: a region is as long as the longest sequence there may be, and a request is admitted only with memory for its
longest answer; most of that is never written. Idea: memory in blocks of a few tokens, a block table for each request,
and blocks granted as the answer grows. Cost: keys and values are read through the table; and memory can run out in the
middle of an answer: then the youngest request gives its blocks back, and is computed anew later.
"""
