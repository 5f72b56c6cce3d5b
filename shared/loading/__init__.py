"""From a model's folder, or its name on the hub, to tensors in place: configuration, safetensors, name maps."""
