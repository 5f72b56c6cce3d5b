"""Phase 6.1: plan–run attention.

Problem: one program reads a sequence's keys, or a fixed share of them, so most of a GPU idles while the longest
sequence is read. Idea: lengths are known before a step, so the host divides the keys of all sequences into splits of
one size, as many as run at once; every layer's kernel follows that plan, and the states of the splits are merged. Cost:
a plan for each step and window, and a merge for each row that was split.
"""
