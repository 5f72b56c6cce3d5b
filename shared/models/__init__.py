"""Decoder models: configurations, the parts of a block, the three families, and the whole model."""
