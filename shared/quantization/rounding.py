"""Rounds a matrix to 8 or 4 bits, to the format's nearest number. Introduced in phase 10."""

import torch

from shared.errors import ConfigError
from shared.quantization.weight import QuantizedWeight, pack_nibbles

METHODS = ("fp8", "int8", "int4")
FP8_MAX = 448.0
GROUPS = (128, 64, 32)


def quantize(weight: torch.Tensor, method: str, group: int | None = None) -> QuantizedWeight:
    """W ``[N, K]`` in ``fp8`` or ``int8`` with one scale per row, or in ``int4`` with one scale per group of columns.

    Groups have ``group`` columns, by default the largest of 128, 64 and 32 that divide K. Quantization is symmetric,
    and scales are fp32. A row or group of zeros has the scale 1. Raises ConfigError for INT4 if no group divides K.
    """
    rows, columns = weight.shape
    weight = weight.float()
    if method == "fp8":
        return QuantizedWeight(*rounded(weight, FP8_MAX, torch.float8_e4m3fn), None, columns)
    if method == "int8":
        return QuantizedWeight(*rounded(weight, 127.0, torch.int8), None, columns)
    group = group or next((size for size in GROUPS if columns % size == 0), None)
    if group is None:
        raise ConfigError(
            f"quantization 'int4' needs rows whose length is divisible by 32, and a matrix has the shape "
            f"[{rows}, {columns}]; choose 'int8' or 'fp8'."
        )
    numbers, scales = rounded(weight.unflatten(1, (-1, group)), 7.5, torch.int8)
    return QuantizedWeight(pack_nibbles(numbers.flatten(1) + 8, group), scales.squeeze(-1), None, group)


def rounded(weight: torch.Tensor, most: float, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers of a dtype, and the scale of each row ``[.., 1]``, the value of one unit.

    The last dimension of ``weight`` is a row, whose largest magnitude becomes ``most`` units; a row of zeros has the
    scale 1. Integers are rounded to the nearest, but at most ``most``: 7.5 units to 7, and -7.5 to -8.
    """
    # exercise 10x1: the numbers of each row, and its scale
    # hint: amax(-1, keepdim=True) of the magnitudes, over `most`; torch.where for rows of zeros
    # hint: a cast to an integer drops the fraction, so round before; a cast to FP8 rounds by itself
    # hint: -7.5 is rounded to -8, which 4 bits have, and 7.5 to 8, which they have not: clamp to int(most)
    largest = weight.abs().amax(-1, keepdim=True)
    scales = torch.where(largest > 0, largest / most, 1.0)
    numbers = (weight / scales).clamp(-most, most)
    if not dtype.is_floating_point:
        numbers = numbers.round().clamp(max=int(most))
    return numbers.to(dtype), scales
    # end exercise
