"""The chapters of the course, the workshop that turns the reference into exercises, and the checker of the chapters."""
