"""The chapters of the course, and the workshop that turns the reference into exercises. Empty so far."""
