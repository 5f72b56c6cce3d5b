"""Kernels that write keys and values and attend to them."""
