"""Rounds a matrix to 8 or 4 bits, to the nearest number of the format. Introduced in phase 10."""

import torch

from shared.errors import ConfigError
from shared.quantization.weight import QuantizedWeight, pack_nibbles

METHODS = ("fp8", "int8", "int4")
FP8_MAX = 448.0
GROUPS = (128, 64, 32)


def quantize(weight: torch.Tensor, method: str, group: int | None = None) -> QuantizedWeight:
    """W ``[N, K]`` in ``fp8`` or ``int8`` with a scale a row, or in ``int4`` with a scale for a group of columns.

    Groups have ``group`` columns, by default the largest of 128, 64 and 32 that divide K. Zeros are symmetric, scales
    fp32. A row or group of zeros has the scale 1. Raises ConfigError for INT4 if no group divides K.
    """
    rows, columns = weight.shape
    weight = weight.float()
    if method != "int4":
        most = FP8_MAX if method == "fp8" else 127.0
        scales = _scales(weight, most)
        values = (weight / scales).clamp(-most, most)
        values = values.to(torch.float8_e4m3fn) if method == "fp8" else values.round().to(torch.int8)
        return QuantizedWeight(values, scales, None, columns)
    group = group or next((size for size in GROUPS if columns % size == 0), None)
    if group is None:
        raise ConfigError(
            f"quantization 'int4' needs rows whose length is divisible by 32, and a matrix has the shape "
            f"[{rows}, {columns}]; choose 'int8' or 'fp8'."
        )
    groups = weight.unflatten(1, (-1, group))
    scales = _scales(groups, 7.5)
    numbers = (groups / scales).round().clamp(-8, 7).flatten(1) + 8
    return QuantizedWeight(pack_nibbles(numbers, group), scales.squeeze(-1), None, group)


def _scales(weight: torch.Tensor, most: float) -> torch.Tensor:
    """What one unit stands for, if the largest magnitude of the last dimension is to be ``most``: ``[.., 1]``."""
    largest = weight.abs().amax(-1, keepdim=True)
    return torch.where(largest > 0, largest / most, 1.0)
