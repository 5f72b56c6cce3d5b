"""Phase 9.1: segments, a side track.

Problem: a prefix is reused only where it is one; a document after another document is computed again for each prompt.
Idea: compute each document by itself, once, and let a request read it at any place: a score depends on the distance of
query and key only, so the query is moved, not the keys. Cost: a segment's values know nothing of the segments before
it, so the answer is not that to the concatenated text; and each segment that is read is an attention of its own.
"""
