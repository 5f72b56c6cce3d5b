"""The storages of keys and values in blocks, by their name in ``EngineConfig.kv_cache_dtype``. Introduced in phase 10.

Before phase 10 there is one, :class:`shared.cache.view.block_storage.PlainStorage`. A new storage is a module that
implements :class:`shared.cache.view.block_storage.BlockStorage`, and a row here. Invariant: the names are those of
``shared.engine.config.KV_CACHE_DTYPES``.
"""

from shared.cache.view.block_storage import MakeStorage, PlainStorage
from shared.cache.view.fp8_storage import Fp8Storage

STORAGES: dict[str, MakeStorage] = {"auto": PlainStorage.of, "fp8": Fp8Storage.of}
