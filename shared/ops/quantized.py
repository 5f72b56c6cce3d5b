"""The product with a quantized weight. Introduced in phase 10."""

import torch
import torch.nn.functional as F

from shared.quantization.weight import QuantizedWeight, dequantize


def linear(x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``x Wᵀ + b``: ``[T, N]`` of x ``[T, K]``."""
    return F.linear(x, dequantize(weight).to(x.dtype), bias)
