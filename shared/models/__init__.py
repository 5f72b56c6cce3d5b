"""Decoder models: configurations, block components, the three families, and the whole model."""
