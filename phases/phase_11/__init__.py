"""Phase 11: speculative decoding.

Problem: a decode step reads every weight to give each request one token, and the arithmetic units wait. Idea: guess
the next tokens cheaply, compute all of them in one step, and keep those that the model itself would have sampled. Cost:
wrong guesses are computed in vain, and a step with guesses cannot be planned before the tokens of the step before it
are known.
"""
