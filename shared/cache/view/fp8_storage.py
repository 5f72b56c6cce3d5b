"""Keys and values in blocks, in 8 bits. Introduced in phase 10.

A number is divided by the scale of its layer and KV head, and stored as e4m3 (:mod:`shared.kernels.e4m3`).
``kv_write`` rounds and attention widens, in the launches of the other storages, so everything else is unchanged:
blocks, tables, plans, copies, captures. The storage is uint8, which PyTorch indexes and copies on every device; a GPU
that converts FP8 reads the same bytes as FP8.

The scales are the checkpoint's if it has any, and otherwise 1, as in vLLM: e4m3 has its own exponent, so a scale only
shifts its range, and the keys and values of most models lie within it.

Invariant: scales are constants. Blocks outlive requests and are shared, and a captured launch reads one scale for all
blocks of a head. A scale that followed the tokens would change the meaning of cached blocks, and an answer would depend
on earlier requests.
"""

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor

from shared.cache.layout.paged import PagedSizes
from shared.cache.view.block_storage import KeysAndValues, PlainStorage
from shared.engine.config import EngineConfig
from shared.kernels.e4m3 import dequantized, quantized
from shared.kernels.launch import generation, launches
from shared.loading.checkpoint import Checkpoint
from shared.loading.config_json import read_config
from shared.loading.kv_scales import kv_scales
from shared.loading.resolve import resolve_model
from shared.models.causal_lm import CausalLM
from shared.models.config import ModelConfig


class Fp8Storage:
    """Keys and values as bytes; see :class:`shared.cache.view.block_storage.BlockStorage`.

    Args:
        dtype: the model's, in which keys and values are read.
        scales: fp32 ``[2, layers, Hkv]``, of keys and values; None: 1.
    """

    def __init__(
        self,
        config: ModelConfig,
        sizes: PagedSizes,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        scales: Tensor | None = None,
    ) -> None:
        self.dtype = dtype
        self.blocks = PlainStorage(config, sizes, torch.uint8, device)
        self.keys, self.values, self.num_bytes = self.blocks.keys, self.blocks.values, self.blocks.num_bytes
        self.copy, self.make_readable = self.blocks.copy, self.blocks.make_readable
        self.layer_keys, self.layer_values = self.blocks.layer_keys, self.blocks.layer_values
        if launches(self.keys) and generation(self.keys.device).has_fp8:
            self.layer_keys, self.layer_values = (
                memory.view(torch.float8_e4m3fn).unbind(0) for memory in (self.keys, self.values)
            )
        if scales is None:
            scales = torch.ones(2, config.num_layers, config.num_kv_heads)
        of_keys, of_values = scales.to(self.keys.device, torch.float32).unbind(0)
        self.arguments: Sequence[dict[str, Any]] = [
            {"k_scales": k, "v_scales": v} for k, v in zip(of_keys, of_values, strict=True)
        ]

    @classmethod
    def of(cls, config: EngineConfig, model: CausalLM, sizes: PagedSizes) -> Self:
        """See ``MakeStorage``."""
        folder = resolve_model(config.model)
        scales = kv_scales(Checkpoint(folder), read_config(folder, can_quantize=True))
        if scales is not None:  # a rank has a part of the KV heads
            scales = scales.narrow(-1, model.config.first_kv_head, model.config.num_kv_heads)
        return cls(model.config, sizes, model.dtype, model.device, scales)

    def write(self, layer: int, k: Tensor, v: Tensor, slots: Tensor) -> None:
        scales = self.arguments[layer]
        self.blocks.write(layer, quantized(k, scales["k_scales"]), quantized(v, scales["v_scales"]), slots)

    def read(self, layer: int, blocks: Tensor) -> KeysAndValues:
        k, v = self.blocks.read(layer, blocks)
        scales = self.arguments[layer]
        return dequantized(k, scales["k_scales"], self.dtype), dequantized(v, scales["v_scales"], self.dtype)
