"""The kernel of gated additions."""
