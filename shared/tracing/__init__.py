"""A timeline of an engine's run: recorded around its steps, written for Perfetto and as a page of its own."""
