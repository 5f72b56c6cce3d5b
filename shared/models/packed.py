"""Projections that keep 16-bit weights 16 bits wide on the CPU and still compute in fp32. Introduced in phase 3.

With a cache, a step reads every weight for one token: decoding runs at the speed of the memory, and the only way to be
faster is to read fewer bytes. Checkpoints store 16-bit weights, which a CPU engine widens to fp32 to compute with.
FBGEMM (Khudia et al., arXiv 2101.05615), inside PyTorch on x86, has a product that reads fp16 weights and widens them
in registers; inputs, sums and outputs are fp32. Invariant: a weight is packed only if fp16 holds it to the last bit, so
a packed model is the same model, at half the bytes; all other projections stay as they are.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn

from shared.models.causal_lm import CausalLM
from shared.models.norm import RMSNorm
from shared.models.projection import Projection, ProjectionGroup

SUPPORTED_ENGINES = torch.backends.quantized.supported_engines


class PackedProjection(nn.Module):
    """A :class:`Projection` whose fp32 weight ``[out, in]`` fits fp16, on the CPU; the interface is the same."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.weight = torch.ops.quantized.linear_prepack_fp16(weight, bias)

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


class PackedGroup(nn.Module):
    """A :class:`ProjectionGroup` as one packed matrix, whose outputs are cut apart: one product instead of three."""

    def __init__(self, group: ProjectionGroup) -> None:
        super().__init__()
        members = [member for member in group.children() if isinstance(member, Projection)]
        biases = [member.bias for member in members if member.bias is not None]
        self.sizes = [len(member.weight) for member in members]
        self.merged = PackedProjection(
            torch.cat(tuple(member.weight for member in members)), torch.cat(tuple(biases)) if biases else None
        )

    def forward(self, x: torch.Tensor, norm: RMSNorm | None = None) -> tuple[torch.Tensor, ...]:
        """x fp32 ``[T, in]`` to one ``[T, out]`` for each member, in order."""
        return self.merged(x, norm=norm).split(self.sizes, dim=-1)


def pack(model: CausalLM) -> CausalLM:
    """Replace, in place, what can be packed without loss; anything but an fp32 model on an x86 CPU stays as it is.

    FBGEMM rearranges a weight at some 40 ns a number on one core, so this takes seconds for each hundred million.
    """
    if model.device.type == "cpu" and model.dtype == torch.float32 and "fbgemm" in SUPPORTED_ENGINES:
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            list(pool.map(_pack_children, [model, *model.blocks]))
    return model


def _pack_children(module: nn.Module) -> None:
    for name, child in module.named_children():
        if isinstance(child, ProjectionGroup) and _fits_fp16(child):
            setattr(module, name, PackedGroup(child))
        elif isinstance(child, Projection) and _fits_fp16(child):
            setattr(module, name, PackedProjection(child.weight, child.bias))
        elif not isinstance(child, nn.ModuleList):  # the blocks have their own turn
            _pack_children(child)


def _fits_fp16(module: nn.Module) -> bool:
    return all(torch.equal(weight.half().float(), weight) for weight in module.parameters())
