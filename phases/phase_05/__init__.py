"""Phase 5: continuous batching.

Problem: a static batch runs until its longest answer ends; the places of the short ones stay empty, and whoever comes
meanwhile waits. Idea: schedule by the step and not by the batch: who ends makes room at once, who comes joins in the
next step. Cost: prompts now run between the tokens of others, who wait for them; a policy says how long.
"""
