"""The recordings that the stepper shows in the chapters, and how they are made: ``make recordings``."""
