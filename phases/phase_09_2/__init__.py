"""Phase 9.2, a side track: a KV cache that each head compresses for itself.

Problem: in a long generation the KV cache grows with every token, and every step reads all of it. Idea: attention looks
at a few tokens, and the last queries say at which; every so many tokens each head keeps the keys that it needs, within
a budget, and the blocks of the others are freed. Cost: what is dropped is gone; the output is no longer the model's
own, and how much it differs has to be measured.
"""
