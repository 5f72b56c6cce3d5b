"""Commands about the course: its phases, their differences, speeds and limits."""
