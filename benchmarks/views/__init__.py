"""Reports as tables and pictures."""
