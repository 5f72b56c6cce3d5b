"""8- and 4-bit weights: the matrices, the checkpoint formats, rounding. Introduced in phase 10."""
