"""Phase 12: structured output.

Problem: a program reads the answer, and an answer that is almost JSON is not JSON. Idea: before each token is sampled,
an automaton determines which tokens can continue a valid text, and all others get a logit of -inf. Cost: a mask over
the whole vocabulary for each token, and grammars that must be compiled first.
"""
