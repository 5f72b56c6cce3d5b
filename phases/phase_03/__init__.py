"""Phase 3: the KV cache.

Problem: the plain loop computes every token again for each new one, though the keys and values of the past never
change. Idea: keep them. Prefill runs the prompt once; decode runs one token and attends over what is kept. Cost:
memory, 2 · layers · Hkv · D numbers a token, and a loop that now reads the whole model for a single token.
"""
