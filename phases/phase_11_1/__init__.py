"""Phase 11.1, a side track: multi-token prediction with gated LoRA.

Problem: a draft model takes memory and forwards of its own, and a lookup finds only what the text repeats. Idea: the
model drafts for itself. Mask tokens stand for the tokens to come, and low-rank additions that act on them alone teach
the model to look ahead, so one forward verifies the last guesses and makes the next. Cost: an adapter must be trained,
and a step computes up to (k + 1)² tokens for k guesses.
"""
