"""Phase 10: quantized weights.

Problem: a token takes as long as reading the weights, which have 16 bits each. Idea: keep them in 8 or 4 bits, with one
scale per row, block or group, and widen them in registers, inside the product, so that only the small weights are read.
Cost: rounding changes the logits, and widening takes instructions.
"""
