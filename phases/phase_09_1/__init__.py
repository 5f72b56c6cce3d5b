"""Phase 9.1: segments, a side track.

Problem: a prefix is reused only at the beginning; a document after another document is recomputed for each prompt.
Idea: compute each document by itself, once, and let a request read it at any position: a score depends only on the
distance between query and key, so the query is moved, not the keys. Cost: a segment's values do not depend on earlier
segments, so the answer differs from the one to the concatenated text; and each segment that is read is a separate
attention.
"""
