"""A weight matrix in 8 or 4 bits. Introduced in phase 10."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

RUN = 128  # columns that are packed together where a scale belongs to more


@dataclass(frozen=True)
class QuantizedWeight:
    """A matrix W ``[N, K]`` in 8 or 4 bits: ``W[n, k] = (values[n, k] - zero) · scale`` of the group of (n, k).

    A row of 4 bits is packed by runs of G columns, where G is ``columns_per_scale`` and at most 128: byte i of a run
    holds column i in its low half and column i + G / 2 in its high half.
    """

    values: torch.Tensor  # [N, K] float8_e4m3fn or int8; 4 bits: uint8 [N, K / 2]
    scales: torch.Tensor  # [ceil(N / rows_per_scale), K / columns_per_scale]
    zeros: torch.Tensor | None  # 4 bits only: uint8, of the shape of the scales; None: 8 bits have no zero, 4 bits 8
    columns_per_scale: int
    rows_per_scale: int = 1

    @property
    def bits(self) -> int:
        return 4 if self.values.dtype == torch.uint8 else 8

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        rows, width = self.values.shape
        return rows, width * 8 // self.bits

    @property
    def run(self) -> int:
        """Columns that are packed together."""
        return min(self.columns_per_scale, RUN)


def pack_nibbles(numbers: torch.Tensor, run: int) -> torch.Tensor:
    """Numbers 0 to 15 ``[N, K]`` as uint8 ``[N, K / 2]``."""
    low, high = numbers.to(torch.uint8).unflatten(1, (-1, 2, run // 2)).unbind(2)
    return (low | high << 4).flatten(1)


def unpack_nibbles(packed: torch.Tensor, run: int) -> torch.Tensor:
    """Inverse of :func:`pack_nibbles`."""
    packed = packed.unflatten(1, (-1, run // 2))
    return torch.stack((packed & 15, packed >> 4), 2).flatten(1)


def dequantize(weight: QuantizedWeight) -> torch.Tensor:
    """W in fp32 ``[N, K]``."""
    rows, _ = weight.shape

    def spread(of_groups: torch.Tensor) -> torch.Tensor:
        by_row = of_groups.float().repeat_interleave(weight.rows_per_scale, 0)[:rows]
        return by_row.repeat_interleave(weight.columns_per_scale, 1)

    if weight.bits == 8:
        return weight.values.float() * spread(weight.scales)
    zeros = 8 if weight.zeros is None else spread(weight.zeros)
    return (unpack_nibbles(weight.values, weight.run).float() - zeros) * spread(weight.scales)


def concatenate(weights: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """Matrices of one format, one below the other."""
    first, rows_per_scale = weights[0], weights[0].rows_per_scale
    scales = [weight.scales for weight in weights]
    if any(weight.shape[0] % rows_per_scale for weight in weights[:-1]):
        scales = [weight.scales.repeat_interleave(rows_per_scale, 0)[: weight.shape[0]] for weight in weights]
        rows_per_scale = 1
    zeros = [weight.zeros for weight in weights if weight.zeros is not None]
    return QuantizedWeight(
        torch.cat([weight.values for weight in weights]),
        torch.cat(scales),
        torch.cat(zeros) if zeros else None,
        first.columns_per_scale,
        rows_per_scale,
    )
