"""The quantized checkpoints that are read, by the method that ``quantization_config`` names. Introduced in phase 10."""
