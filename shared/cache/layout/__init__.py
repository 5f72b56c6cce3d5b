"""Where a batch's tokens are in a KV cache, as numpy arrays: slots, block tables, plans."""
