"""Kernels that choose, move and attend to the keys that heads keep."""
