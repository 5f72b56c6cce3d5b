"""Projections that keep 16-bit weights 16 bits wide on the CPU and still compute in fp32. Introduced in phase 3.

With a cache, a step reads every weight for one token: decoding runs at the speed of the memory, and the only way to be
faster is to read fewer bytes. Checkpoints store 16-bit weights, which a CPU engine widens to fp32 to compute with.
FBGEMM (Khudia et al., arXiv 2101.05615), inside PyTorch on x86, has a product that reads fp16 weights and widens them in
registers; inputs, sums and outputs are fp32. Invariant: a weight is packed only if fp16 holds it to the last bit, so a
packed model is the same model, at half the bytes; all other projections stay as they are.
"""

from collections.abc import Callable

import torch
from torch import nn

from shared.models.causal_lm import CausalLM
from shared.models.norm import RMSNorm
from shared.models.projection import Projection


class PackedProjection(nn.Module):
    """A :class:`Projection` on a CPU whose fp32 weight fits fp16; the interface is the same."""

    def __init__(self, projection: Projection) -> None:
        super().__init__()
        self.weight = torch.ops.quantized.linear_prepack_fp16(projection.weight, projection.bias)
        self.num_bytes = projection.weight.nbytes // 2

    def forward(
        self,
        x: torch.Tensor,
        norm: RMSNorm | None = None,
        residual: torch.Tensor | None = None,
        activation: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """x fp32 ``[T, in]`` to ``[T, out]``."""
        if norm is not None:
            x = norm(x)
        y = torch.ops.quantized.linear_dynamic_fp16(x, self.weight)
        if activation is not None:
            y = activation(y)
        return y if residual is None else residual + y


def pack(model: CausalLM) -> CausalLM:
    """Replace, in place, every projection that can be packed without loss; a GPU's model is returned as it is."""
    if model.device.type == "cpu" and model.dtype == torch.float32 and "fbgemm" in _supported_engines():
        for name, module in list(model.named_modules()):
            if isinstance(module, Projection) and _fits_fp16(module.weight):
                model.set_submodule(name, PackedProjection(module))
    return model


def _supported_engines() -> list[str]:
    return torch.backends.quantized.supported_engines


def _fits_fp16(weight: torch.Tensor) -> bool:
    return torch.equal(weight.half().float(), weight)
