"""Kernels for norms, and for products with 16-, 8- and 4-bit weights."""
