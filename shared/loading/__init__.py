"""Loads models from a folder or a hub name: configuration, safetensors, tensor name maps."""
