"""Whether two computations of the same numbers agree: a reference, error bounds, a layer-by-layer comparison."""
