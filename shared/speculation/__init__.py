"""Speculative decoding: drafters, and how many tokens they propose."""
