"""The mathematics of a decoder in PyTorch, readable as formulas, on any device.

Every op is at once the specification of a kernel, its CPU implementation, and the oracle that the kernel is tested
against.
"""
