"""Weights of 8 and 4 bits. Introduced in phase 10."""
