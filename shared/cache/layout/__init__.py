"""Where the tokens of a batch stand in a KV cache, as numpy arrays: slots, block tables, plans."""
