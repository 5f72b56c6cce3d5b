"""Phase 5: continuous batching.

Problem: a static batch runs until its longest answer ends; the places of the short ones stay empty, and requests that
come meanwhile wait. Idea: schedule by the step and not by the batch: a request that ends makes room at once, one that
waits joins in the next step. Cost: prompts now run between the tokens of other requests, which wait for them; a policy
says how long.
"""
