"""A weight matrix in 8 or 4 bits. Introduced in phase 10."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

RUN = 128  # columns that are packed together if a scale covers more


@dataclass(frozen=True)
class QuantizedWeight:
    """A matrix W ``[N, K]`` in 8 or 4 bits: ``W[n, k] = (values[n, k] - zero) · scale``, with the zero and scale of the
    group of (n, k).

    A row of 4 bits is packed by runs of G columns, where G is ``columns_per_scale`` and at most 128: byte i of a run
    holds column i in its low half and column i + G / 2 in its high half.
    """

    values: torch.Tensor  # [N, K] float8_e4m3fn or int8; 4 bits: uint8 [N, K / 2]
    scales: torch.Tensor  # [ceil(N / rows_per_scale), K / columns_per_scale]
    # 4 bits only: uint8, of the shape of the scales; None: 8 bits have no zero, 4 bits have 8
    zeros: torch.Tensor | None
    columns_per_scale: int
    rows_per_scale: int = 1

    def __len__(self) -> int:
        """N, as for a tensor."""
        return len(self.values)

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
        """Columns packed together."""
        return min(self.columns_per_scale, RUN)

    @property
    def num_bytes(self) -> int:
        """The matrix's size, including scales and zeros."""
        return sum(part.nbytes for part in (self.values, self.scales, self.zeros) if part is not None)

    @cached_property
    def cpu_scales(self) -> torch.Tensor:
        """Scales in the form of PyTorch's CPU products, bf16: 8 bits ``[N]``; 4 bits ``[K / group, N, 2]``, with the
        correction for numbers that are 8 too large."""
        scales = self.scales.repeat_interleave(self.rows_per_scale, 0)[: len(self)].float()
        if self.bits == 8:
            return scales.flatten().bfloat16()
        zeros = 8 if self.zeros is None else self.zeros.repeat_interleave(self.rows_per_scale, 0)[: len(self)].float()
        return torch.stack((scales, (8 - zeros) * scales), 2).transpose(0, 1).contiguous().bfloat16()

    @cached_property
    def cpu_values(self) -> torch.Tensor:
        """4-bit numbers in the order of PyTorch's CPU product: the same number of bytes again, made on first use."""
        numbers = unpack_nibbles(self.values, self.run).int()
        packed: torch.Tensor = torch.ops.aten._convert_weight_to_int4pack_for_cpu(numbers, 1)
        return packed

    def to(self, device: torch.device) -> "QuantizedWeight":
        """The same matrix on a device, contiguous and aligned for the products, which a mapped or transposed one is
        not."""
        zeros = None if self.zeros is None else self.zeros.to(device).contiguous()
        values = self.values.to(device).contiguous()
        if values.data_ptr() % 16:
            values = values.clone()
        return replace(self, values=values, scales=self.scales.to(device).contiguous(), zeros=zeros)

    def tile(self, start: int, stop: int) -> "QuantizedWeight":
        """Rows start to stop, as a view; ``start`` must be a multiple of ``rows_per_scale``."""
        of_groups = slice(start // self.rows_per_scale, -(-stop // self.rows_per_scale))
        zeros = None if self.zeros is None else self.zeros[of_groups]
        return replace(self, values=self.values[start:stop], scales=self.scales[of_groups], zeros=zeros)


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
    scales = spread(weight, weight.scales)
    if weight.bits == 8:
        return weight.values.float() * scales
    zeros = 8 if weight.zeros is None else spread(weight, weight.zeros)
    return (unpack_nibbles(weight.values, weight.run).float() - zeros) * scales


def spread(weight: QuantizedWeight, of_groups: torch.Tensor) -> torch.Tensor:
    """The scales of a matrix, or its zeros, expanded to one for each of its elements: fp32 ``[N, K]``."""
    # exercise 10x2: what belongs to a block, for each of its numbers
    # hint: of_groups [ceil(N / rows_per_scale), K / columns_per_scale] is spread to [N, K]
    # hint: repeat_interleave(n, dim) repeats each element n times, one beside the other
    # hint: the last block may have fewer rows than the others: cut at len(weight)
    by_row = of_groups.float().repeat_interleave(weight.rows_per_scale, 0)[: len(weight)]
    return by_row.repeat_interleave(weight.columns_per_scale, 1)
    # end exercise


def mergeable(weights: Sequence[QuantizedWeight]) -> bool:
    """Whether the matrices have the same format, so that :func:`concatenate` can take them."""
    return len({(weight.values.dtype, weight.columns_per_scale, weight.scales.dtype) for weight in weights}) == 1


def concatenate(weights: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """Matrices of one format, concatenated along rows; a single one is not copied.

    Block scales become row scales if the blocks do not align.
    """
    if len(weights) == 1:
        return weights[0]
    first, rows_per_scale = weights[0], weights[0].rows_per_scale
    scales = [weight.scales for weight in weights]
    if any(weight.rows_per_scale != rows_per_scale or len(weight) % rows_per_scale for weight in weights):
        scales = [weight.scales.repeat_interleave(weight.rows_per_scale, 0)[: len(weight)] for weight in weights]
        rows_per_scale = 1
    zeros = None
    if any(weight.zeros is not None for weight in weights):
        zeros = torch.cat(
            [w.scales.new_full(w.scales.shape, 8, dtype=torch.uint8) if w.zeros is None else w.zeros for w in weights]
        )
    return QuantizedWeight(
        torch.cat([weight.values for weight in weights]),
        torch.cat(scales),
        zeros,
        first.columns_per_scale,
        rows_per_scale,
    )
