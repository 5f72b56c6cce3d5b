"""Phase 2: generation.

Problem: a model gives one distribution over the next token; an answer is many tokens. Idea: sample a token, append it,
run the whole sequence again, and repeat until a stop condition holds. Cost: the n-th token recomputes all n before it,
so an output of n tokens computes about n²/2 tokens. Phase 3 removes exactly this cost.
"""
