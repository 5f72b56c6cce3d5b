"""Phase 1b: the whole model.

Problem: layers that are correct one by one can still be wired wrongly. Idea: load embedding, every block, the final
norm and the output head from a real checkpoint, and compare the logits of every position with the reference. If they
differ, `infer compare` names the first module that differs. Cost: all the weights in memory, one pass for one token.
"""
