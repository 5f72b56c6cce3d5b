"""Kernels of norms and products with weights of 16, 8 and 4 bits."""
