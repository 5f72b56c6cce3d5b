"""What an engine is made of besides the model: its settings, its requests, its outputs."""
