"""Timelines of an engine's run: recorded around its steps, written for Perfetto and as a standalone HTML page."""
