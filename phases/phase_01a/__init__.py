"""Phase 1a: one layer.

Problem: a model is a few hundred tensors in a file; before it can generate text, one layer must compute exactly what
its authors intended. Idea: write the four operations of a decoder block (RMSNorm, RoPE, grouped-query attention, gated
MLP) as formulas, fill one block from the checkpoint, and compare it with the reference implementation. Cost: nothing
yet; every later phase is measured against this one's correctness.
"""
