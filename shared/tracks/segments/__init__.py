"""Segments of context: computed once, kept by content, placed anywhere in later prompts. Introduced in phase 9.1."""
