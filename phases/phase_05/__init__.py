"""Phase 5: continuous batching.

Problem: a static batch runs until its longest output is complete; rows of finished requests stay empty, and requests
that arrive meanwhile wait. Idea: schedule per step, not per batch: a finished request frees its row at once, and a
waiting request joins in the next step. Cost: prefills now run between the tokens of decoding requests and delay them; a
policy bounds the delay.
"""
