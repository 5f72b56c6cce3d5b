"""Phase 1b: the whole model.

Problem: layers that are right one by one can still be wired wrongly. Idea: embedding, every block, the final norm and
the output head, loaded from a real checkpoint, and the logits of every position compared with the reference. When they
differ, `infer compare` names the first module where they part. Cost: all the weights in memory, one pass for one token.
"""
