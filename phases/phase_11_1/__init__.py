"""Phase 11.1, a side track: multi-token prediction with gated LoRA.

Problem: a draft model takes its own memory and forwards, and a lookup finds only what the text repeats. Idea: the
model drafts for itself. Mask tokens represent the next tokens, and low-rank additions that act only on them teach the
model to look ahead. So one forward verifies the last guesses and makes the next ones. Cost: an adapter must be trained,
and a step computes up to (k + 1)² tokens for k guesses.
"""
