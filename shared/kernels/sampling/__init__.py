"""Kernels from logits to the next token: grammar masks, cutoffs, and sampling."""
