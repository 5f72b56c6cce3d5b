"""Segments of context: computed once, cached by content, used anywhere in later prompts. Introduced in phase 9.1."""
