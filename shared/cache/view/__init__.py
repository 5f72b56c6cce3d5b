"""The device side of KV caches: where a layer writes its keys and values, and what it attends to."""
