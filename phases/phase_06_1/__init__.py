"""Phase 6.1: plan–run attention.

Problem: one program reads a sequence's keys, or a fixed share of them, so while the longest sequence is read most of a
GPU waits. Idea: lengths are known before a step, so the host cuts the keys of all sequences into splits of one size,
as many as run at once, and every layer's kernel follows that plan; what the splits leave is merged. Cost: a plan a step
and window, and a merge for each row that was cut.
"""
