"""The kernel of segments."""
