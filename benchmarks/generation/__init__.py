"""The benchmarks of one answer at a time: results, the peer from transformers, a step's trace."""
