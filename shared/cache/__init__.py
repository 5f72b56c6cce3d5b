"""KV memory: what stands behind the model's ``kv.write`` and ``kv.attend``."""
