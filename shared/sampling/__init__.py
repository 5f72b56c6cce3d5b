"""From logits to a token: parameters, logits processors, counter-based noise and sampling. Introduced in phase 2.

Invariant: a row's token depends on its own logits, parameters, seed, index and history, never on the other rows.
"""
