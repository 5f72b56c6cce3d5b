"""What was measured: reports as JSON, each with its table and picture, cited by the docs."""
