"""Whether two computations of the same numbers agree: a reference, bounds of errors, a comparison by layer."""
