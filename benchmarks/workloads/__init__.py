"""What benchmarks ask of an engine: prompts and arrival times as data."""
