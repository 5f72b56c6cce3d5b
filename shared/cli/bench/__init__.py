"""``infer bench``: one module for each family of benchmarks."""
