"""Kernels from logits to the next token: masks of grammars, cuts, and the draw."""
