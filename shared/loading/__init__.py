"""Loads models from a folder or a hub name: configuration, safetensors, maps of tensor names."""
