"""Phase 3: the KV cache.

Problem: the plain loop recomputes every token for each new one, although the keys and values of past tokens never
change.
Idea: cache them. Prefill runs the prompt once; decode runs one token and attends over the cache. Cost: memory, 2 ·
layers · Hkv · D numbers per token, and a loop that now reads the whole model for a single token.
"""
