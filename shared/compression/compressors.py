"""Compressors: a score for each cached key of each KV head, from the last queries of a layer.

A higher score means that the key is more worth keeping. A compressor only scores; the calibration and the selection
decide how many keys a head keeps. Introduced in phase 09.2.

Invariant: `scores` is a function of its arguments alone and returns fp32 (or fp64 for fp64 inputs).
"""

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class Compressor(Protocol):
    def scores(self, queries: Tensor, keys: Tensor) -> Tensor:
        """queries [w, Hq, D] of the last w positions, keys [n, Hkv, D] in time order -> [Hkv, n]."""
        ...


def window_attention(queries: Tensor, keys: Tensor, scale: float | None = None) -> Tensor:
    """The attention of the last w queries, causal inside the window: [Hkv, Hq / Hkv, w, n].

    Raises ValueError if there are more queries than keys, or if Hkv does not divide Hq.
    """
    w, num_heads, size = queries.shape
    n, num_kv_heads, _ = keys.shape
    if w > n or num_heads % num_kv_heads:
        raise ValueError(f"queries {tuple(queries.shape)} do not fit keys {tuple(keys.shape)}: w <= n, Hkv divides Hq")
    dtype = torch.promote_types(queries.dtype, torch.float32)
    grouped = queries.to(dtype).view(w, num_kv_heads, num_heads // num_kv_heads, size)
    logits = torch.einsum("whgd,nhd->hgwn", grouped, keys.to(dtype)) * (size**-0.5 if scale is None else scale)
    row = torch.arange(n - w, n, device=keys.device)[:, None]
    return logits.masked_fill(torch.arange(n, device=keys.device) > row, -torch.inf).softmax(-1)


@dataclass(frozen=True)
class SnapKV:
    """Attention of the window, summed over its rows, max-pooled along the sequence (arXiv 2404.14469)."""

    kernel: int = 7  # odd, so that pooling keeps the length
    scale: float | None = None  # of the attention; None means D ** -0.5

    def scores(self, queries: Tensor, keys: Tensor) -> Tensor:
        rows = window_attention(queries, keys, self.scale).sum(2)  # [Hkv, g, n]
        return F.max_pool1d(rows, self.kernel, stride=1, padding=self.kernel // 2).amax(1)  # [Hkv, n]


@dataclass(frozen=True)
class VanillaTopP:
    """Mean attention of the window's queries."""

    scale: float | None = None

    def scores(self, queries: Tensor, keys: Tensor) -> Tensor:
        return window_attention(queries, keys, self.scale).mean((1, 2))


@dataclass(frozen=True)
class NoCompression:
    """Every key has the same score: there is no reason to drop one."""

    def scores(self, queries: Tensor, keys: Tensor) -> Tensor:
        return keys.new_zeros(keys.shape[1], keys.shape[0], dtype=torch.promote_types(keys.dtype, torch.float32))
