"""The supported formats of quantized checkpoints, by the method that ``quantization_config`` names. Introduced in phase
10."""
