"""KV caches: the implementations of the model's ``kv.write`` and ``kv.attend``, and the pools that manage them."""
