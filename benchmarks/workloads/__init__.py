"""What benchmarks send to an engine: prompts and arrival times as data."""
