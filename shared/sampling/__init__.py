"""From logits to a token: parameters, counter-based noise, processors and the draw. Introduced in phase 2.

Invariant: the token of a row depends on its own logits, parameters, seed, index and history, never on its neighbours.
"""
