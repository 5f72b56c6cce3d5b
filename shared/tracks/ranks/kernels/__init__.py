"""The kernel of sums over ranks."""
