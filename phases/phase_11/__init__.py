"""Phase 11: speculative decoding.

Problem: a decode step reads every weight to give each request one token, while the arithmetic units wait. Idea: guess
the next tokens cheaply, compute all of them in one step, and keep those that the model itself would have sampled. Cost:
wrong guesses are wasted work, and a step with guesses cannot be planned before the previous step's tokens are known.
"""
