"""Phase 10: quantized weights.

Problem: a token takes as long as reading the weights, and these have 16 bits each. Idea: keep them in 8 or 4 bits, with
a scale for a row, a block or a group, and widen them in registers, inside the product, so that nothing but the small
weights is read. Cost: rounding changes the logits, and widening takes instructions.
"""
