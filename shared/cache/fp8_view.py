"""The model's view of a paged KV cache in 8 bits. Introduced in phase 10.

A number is stored as e4m3 of its quotient by the scale of its layer and KV head (:mod:`shared.kernels.e4m3`).
``kv_write`` rounds and attention widens, in the launches of the other views, so everything else stays: blocks, tables,
plans, copies, captures. The storage is uint8, which PyTorch indexes and copies on every device; a GPU that converts FP8
reads the same bytes as FP8.

Invariants: those of :class:`shared.cache.bucket_view.BucketView`; scales are constants. Blocks outlive requests and are
shared, and a captured launch reads one scale for all blocks of a head: a scale that followed the tokens would change
what cached blocks mean, and an answer would depend on the requests before it.
"""

import torch

from shared.cache.bucket_view import BucketView
from shared.cache.paged_layout import PagedSizes
from shared.cache.paged_view import Piece
from shared.engine.buckets import Buckets
from shared.kernels.e4m3 import dequantized, quantized
from shared.kernels.launch import generation
from shared.models.config import ModelConfig


class Fp8View(BucketView):
    """Keys and values in blocks, as bytes; see ``BatchView``.

    Args:
        buckets: of captured steps; none: no step is padded.
        scales: fp32 ``[2, layers, Hkv]``, of keys and values; None: 1.
    """

    kv_dtype = torch.uint8

    def __init__(
        self,
        config: ModelConfig,
        sizes: PagedSizes,
        dtype: torch.dtype,
        device: torch.device | str,
        backend: str | None,
        buckets: Buckets,
        scales: torch.Tensor | None = None,
    ) -> None:
        super().__init__(config, sizes, dtype, device, backend, buckets)
        if scales is None:
            scales = torch.ones(2, config.num_layers, config.num_kv_heads)
        scales = scales.to(self.keys.device, torch.float32)
        self.dtype = dtype
        self.scales = [{"k_scales": keys, "v_scales": values} for keys, values in zip(*scales.unbind(0), strict=True)]
        if self.is_launching and generation(self.keys.device).has_fp8:
            self.layer_keys, self.layer_values = (
                memory.view(torch.float8_e4m3fn).unbind(0) for memory in (self.keys, self.values)
            )

    def _stored(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scales = self.scales[layer]
        return quantized(k, scales["k_scales"]), quantized(v, scales["v_scales"])

    def _gathered(self, layer: int, piece: Piece) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = super()._gathered(layer, piece)
        scales = self.scales[layer]
        return dequantized(k, scales["k_scales"], self.dtype), dequantized(v, scales["v_scales"], self.dtype)
