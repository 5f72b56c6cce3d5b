"""Compressors: a score for each cached key of each KV head, from the last queries of a layer. Introduced in phase 9.2.

A higher score means that the key is more worth keeping. A compressor only scores; selection
(:mod:`shared.tracks.compression.selection`) decides how many keys a head keeps.

Invariant: ``scores`` is a pure function and returns fp32 (fp64 for fp64 inputs).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor


class Compressor(Protocol):
    """Scores keys. A new compressor is a class here and a row of ``COMPRESSORS``."""

    def scores(self, queries: Tensor, keys: Tensor) -> Tensor:
        """queries [w, Hq, D] of the last w positions, keys [n, Hkv, D] in time order -> [Hkv, n]."""
        ...


class KeyMeasures(Protocol):
    """What a compressor may query: measures of the keys of all layers and heads of S sequences, with n the longest
    head's length."""

    @property
    def num_queries(self) -> int:
        """Of the window."""
        ...

    def mass(self, num_queries: int) -> Tensor:
        """Attention summed over the last queries, [S, L, Hkv, Hq / Hkv, n]; zero past the end of a head's keys."""
        ...

    def redundancy(self, threshold: float) -> Tensor:
        """R-KV's mean cosines, [S, L, Hkv, n]; -inf past the end of a head's keys."""
        ...


@runtime_checkable
class BatchedCompressor(Compressor, Protocol):
    """A compressor that can score the keys of all layers and heads at once."""

    def of_all(self, keys: KeyMeasures, mass: Tensor) -> Tensor:
        """From the ``mass`` of the whole window to scores [S, L, Hkv, n], up to a constant factor."""
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
        # exercise 09.2x1: what the window looks at, and what stands beside it
        # hint: window_attention gives [Hkv, g, w, n]: g query heads share a KV head, w queries are in the window
        # hint: sum over the queries; then a key gets the largest score of the `kernel` keys around it
        # hint: F.max_pool1d(x [.., g, n], kernel, stride=1, padding=kernel // 2) keeps the length
        # hint: a KV head keeps a key if any of its query heads needs it: the maximum over g
        rows = window_attention(queries, keys, self.scale).sum(2)  # [Hkv, g, n]
        return F.max_pool1d(rows, self.kernel, stride=1, padding=self.kernel // 2).amax(1)  # [Hkv, n]
        # end exercise

    def of_all(self, keys: KeyMeasures, mass: Tensor) -> Tensor:
        rows = mass.amax(-2)  # the two maxima commute: this one first leaves less work for the other
        return F.max_pool1d(rows.flatten(0, -2), self.kernel, stride=1, padding=self.kernel // 2).view_as(rows)


@dataclass(frozen=True)
class RKV:
    """Importance minus redundancy, for text that repeats itself (R-KV, arXiv 2505.24133).

    Importance is SnapKV's over the last ``window`` queries, as a mean. Redundancy is a key's similarity to the others:
    its mean over the rows of the keys' cosine matrix, without the diagonal. Among near-duplicates (cosine above
    ``threshold``), each row ignores the newest. A softmax puts redundancy on the scale of attention.
    """

    mix: float = 0.07
    window: int = 8
    kernel: int = 7
    threshold: float = 0.5
    scale: float | None = None

    def scores(self, queries: Tensor, keys: Tensor) -> Tensor:
        window = queries[-self.window :]
        importance = SnapKV(self.kernel, self.scale).scores(window, keys) / len(window)
        unit = F.normalize(keys.to(importance.dtype).transpose(0, 1), dim=-1)  # [Hkv, n, D]
        cosine = unit @ unit.transpose(1, 2)
        cosine.diagonal(dim1=1, dim2=2).zero_()
        order = torch.arange(1, len(keys) + 1, device=keys.device)
        newest = (order * (cosine > self.threshold)).amax(-1, keepdim=True)  # [Hkv, n, 1], 0 without a duplicate
        redundancy = cosine.masked_fill(order == newest, 0).mean(1).softmax(-1)
        return self.mix * importance - (1 - self.mix) * redundancy

    def of_all(self, keys: KeyMeasures, mass: Tensor) -> Tensor:
        importance = SnapKV(self.kernel).of_all(keys, keys.mass(self.window)) / min(self.window, keys.num_queries)
        redundancy = keys.redundancy(self.threshold).softmax(-1)
        return self.mix * importance - (1 - self.mix) * redundancy


@dataclass(frozen=True)
class VanillaTopP:
    """Mean attention of the window's queries."""

    scale: float | None = None

    def scores(self, queries: Tensor, keys: Tensor) -> Tensor:
        return window_attention(queries, keys, self.scale).mean((1, 2))

    def of_all(self, keys: KeyMeasures, mass: Tensor) -> Tensor:
        return mass.mean(-2)


@dataclass(frozen=True)
class StreamingLLM:
    """The newest keys, regardless of content: with the sinks, a sliding window (arXiv 2309.17453); the baseline."""

    def scores(self, queries: Tensor, keys: Tensor) -> Tensor:
        order = torch.arange(keys.shape[0], device=keys.device, dtype=torch.promote_types(keys.dtype, torch.float32))
        return order.expand(keys.shape[1], -1)


@dataclass(frozen=True)
class NoCompression:
    """Every key must be kept: an infinite score exceeds any budget."""

    def scores(self, queries: Tensor, keys: Tensor) -> Tensor:
        return torch.full(keys.shape[1::-1], torch.inf, device=keys.device)


COMPRESSORS: dict[str, Callable[[float], Compressor]] = {
    "snapkv": lambda scale: SnapKV(scale=scale),
    "rkv": lambda scale: RKV(scale=scale),
    "topp": lambda scale: VanillaTopP(scale),
    "streaming": lambda scale: StreamingLLM(),
    "none": lambda scale: NoCompression(),
}
"""The values of ``EngineConfig.compress_method``; the argument is the model's attention scale."""
