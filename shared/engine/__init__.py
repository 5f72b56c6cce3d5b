"""What an engine consists of besides the model: its settings, its requests and its outputs."""
