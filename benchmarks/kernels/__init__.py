"""The kernel benchmarks: what they call, what they compare it with, and how a report shows it."""
