"""The product with a weight of 8 or 4 bits in PyTorch operations. Introduced in phase 10.

On a CPU INT8 with a scale a row is multiplied by ``torch._weight_int8pack_mm``, which widens in registers. It is fast
for x in bf16 alone, so x of fp32 is rounded to bf16, and so is the result. It loads 16 bytes of W at a time, which must
be aligned. For INT4 and x in bf16 there is such a product too. Everything else is dequantized.

Invariant: no copy of the whole matrix exists in another dtype; rows are dequantized a tile at a time.
"""

import torch
import torch.nn.functional as F

from shared.quantization.weight import QuantizedWeight, dequantize

CPU_GROUPS = (32, 64, 128)  # columns that share a scale, in PyTorch's product of 4 bits on a CPU
TILE_ROWS = 1024  # a multiple of the rows of an FP8 block


def linear(x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``x Wᵀ + b``: ``[T, N]`` of x ``[T, K]``, in the dtype of x."""
    is_int8_by_row = weight.values.dtype == torch.int8 and weight.scales.shape == (len(weight), 1)
    is_aligned = x.shape[1] % 32 == 0 and weight.values.data_ptr() % 16 == 0
    is_int4 = weight.bits == 4 and x.dtype == torch.bfloat16 and len(weight) % 64 == 0
    if is_int8_by_row and is_aligned and x.device.type == "cpu":
        y = torch._weight_int8pack_mm(x.bfloat16().contiguous(), weight.values, weight.cpu_scales).to(x.dtype)
    elif is_int4 and weight.columns_per_scale in CPU_GROUPS and x.device.type == "cpu":
        about = weight.cpu_values, weight.columns_per_scale, weight.cpu_scales
        y = torch.ops.aten._weight_int4pack_mm_for_cpu(x.contiguous(), *about)
    else:
        rows = max(TILE_ROWS, weight.rows_per_scale)
        tiles = (weight.tile(start, start + rows) for start in range(0, len(weight), rows))
        y = torch.cat([F.linear(x, dequantize(tile).to(x.dtype)) for tile in tiles], dim=1)
    return y if bias is None else y + bias
