"""The product with an 8- or 4-bit weight, in PyTorch operations. Introduced in phase 10.

On a CPU, INT8 with one scale per row is multiplied by ``torch._weight_int8pack_mm``, and INT4 in groups by
``_weight_int4pack_mm_for_cpu``; both widen in registers. Both are fast only for x in bf16, so an fp32 x is rounded to
bf16, and so is the result. The first loads 16 bytes of W at a time, which must be aligned. Everything else is
dequantized.

Invariant: no copy of the whole matrix exists in another dtype; rows are dequantized one tile at a time.
"""

import torch
import torch.nn.functional as F

from shared.quantization.weight import QuantizedWeight, dequantize

CPU_GROUPS = (32, 64, 128)  # columns that share a scale in PyTorch's 4-bit product on a CPU
TILE_ROWS = 1024  # a multiple of the rows of an FP8 block


def linear(x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``x Wᵀ + b``: ``[T, N]`` of x ``[T, K]``, in the dtype of x."""
    is_on_cpu = x.device.type == "cpu"
    is_int8_by_row = weight.values.dtype == torch.int8 and weight.scales.shape == (len(weight), 1)
    is_aligned = x.shape[1] % 32 == 0 and weight.values.data_ptr() % 16 == 0
    is_grouped_int4 = weight.bits == 4 and weight.columns_per_scale in CPU_GROUPS and len(weight) % 64 == 0
    if is_on_cpu and is_int8_by_row and is_aligned:
        y = torch._weight_int8pack_mm(x.bfloat16().contiguous(), weight.values, weight.cpu_scales).to(x.dtype)
    elif is_on_cpu and is_grouped_int4:
        packed = weight.cpu_values, weight.columns_per_scale, weight.cpu_scales
        y = torch.ops.aten._weight_int4pack_mm_for_cpu(x.bfloat16().contiguous(), *packed).to(x.dtype)
    else:
        rows = max(TILE_ROWS, weight.rows_per_scale)
        tiles = (weight.tile(start, start + rows) for start in range(0, len(weight), rows))
        y = torch.cat([F.linear(x, dequantize(tile).to(x.dtype)) for tile in tiles], dim=1)
    return y if bias is None else y + bias
