"""Weights of 8 and 4 bits: the matrices, the checkpoints' formats, rounding. Introduced in phase 10."""
