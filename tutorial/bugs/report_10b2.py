"""An FP8 cache ruins the values of models with scales of their own.

Without scales in the checkpoint, `kv_cache_dtype="fp8"` is fine. With them, keys come back as they were and values do
not: they are off by a constant factor for each head, or cut at the largest number.
"""

import torch

from shared.cache.layout.paged import PagedSizes
from shared.cache.view.fp8_storage import Fp8Storage
from shared.checkpoints.shapes import SHAPES
from shared.loading.config_json import parse_config

torch.manual_seed(0)
config = parse_config(SHAPES["tiny-llama"])
shape = config.num_layers, config.num_kv_heads
scales = torch.stack([torch.full(shape, 0.5), torch.full(shape, 0.01)])
sizes = PagedSizes(num_blocks=4, block_size=4, max_sequences=1, max_tokens=16, max_seq_len=16)
storage = Fp8Storage(config, sizes, torch.float32, scales=scales)
k, v = torch.randn(2, 4, config.num_kv_heads, config.head_dim).unbind(0)
storage.make_readable()
storage.write(0, k, v, torch.arange(4))
keys, values = (part.reshape(-1) for part in storage.read(0, torch.tensor([0])))
error = {"keys": abs(keys.norm() / k.norm() - 1).item(), "values": abs(values.norm() / v.norm() - 1).item()}
print("the norms differ from what was written by", {name: f"{100 * part:.1f} %" for name, part in error.items()})
raise SystemExit(max(error.values()) > 0.05)
