"""Recordings of an engine's steps, line by line: what the stepper shows. Introduced in phase 4."""
