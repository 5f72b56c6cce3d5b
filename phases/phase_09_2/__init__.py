"""Phase 9.2, a side track: a KV cache that each head compresses separately.

Problem: in a long generation the KV cache grows with every token, and every step reads all of it. Idea: attention uses
few tokens, and the last queries show which. At intervals, each head keeps the keys that it needs, within a budget, and
the blocks of the others are freed. Cost: dropped keys are lost; the output is no longer the model's own, and the
difference must be measured.
"""
