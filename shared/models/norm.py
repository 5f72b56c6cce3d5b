"""RMSNorm as a module. Introduced in phase 1a.

Parameters are created on the meta device, here and in every module of a model: they take no memory until a checkpoint's
tensor replaces them.
"""

import torch
from torch import nn

from shared.ops.rmsnorm import rms_norm


def empty_parameter(*shape: int) -> nn.Parameter:
    """A parameter without memory, to be replaced by a checkpoint's tensor of this shape."""
    return nn.Parameter(torch.empty(*shape, device="meta"), requires_grad=False)


class RMSNorm(nn.Module):
    """:func:`shared.ops.rmsnorm.rms_norm` over the last dimension, of ``size``. Replacements have the same methods."""

    def __init__(self, size: int, eps: float, offset: float = 0.0) -> None:
        super().__init__()
        self.weight = empty_parameter(size)
        self.eps = eps
        self.offset = offset

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """``norm(x) + residual``: both ``[..., size]``; ``residual`` may be absent."""
        y = rms_norm(x, self.weight, self.eps, self.offset)
        return y if residual is None else residual + y

    def after(self, post_norm: "RMSNorm", y: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The sum ``s = residual + post_norm(y)`` and its norm, as ``(norm(s), s)``: ``[..., size]`` each."""
        s = residual + post_norm(y)
        return self(s), s
