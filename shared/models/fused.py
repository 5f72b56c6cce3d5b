"""Parts with merged matrices and operations fused into kernels. Introduced in phase 3.1.

On a GPU a decode step is a sequence of launches, each with its own overhead, and most of them process vectors of a few
kilobytes.
With fused parts, each line of a block is one launch: matrices that read the same input are merged (queries, keys and
values; gate and up), a norm becomes the prologue of the next product, and an activation or the residual addition
becomes the epilogue of the previous one. (In steps of several tokens the product launches the norm before it: see
:mod:`shared.kernels.products.gemv`.)

A Gemma block norms the outputs of attention and MLP before it adds them. That norm needs the whole row, which no single
program of a product has, so it cannot be an epilogue. It is a kernel between two products, combined with the addition
and, after attention, with the MLP's norm.

Invariants: the family's block runs with other parts; a fused model computes the same operations in the same order and
rounds less often; on a CPU the launchers call the ops.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from shared.kernels.launch import check_head_size, check_launchable
from shared.kernels.products import gated_gemm, gemv
from shared.kernels.products.rmsnorm import add_rms_norm, rms_norm
from shared.models.causal_lm import CausalLM
from shared.models.mlp import GatedMLP
from shared.models.norm import RMSNorm
from shared.models.parts import MergedGroup, find_at_once, merged_biases, replace_parts
from shared.models.projection import Projection, ProjectionGroup
from shared.ops.gated import GatedOp


class FusedProjection(nn.Module):
    """One matrix that replaces one :class:`Projection`, or several with the same x, by concatenating their outputs.

    The weight of a single projection is not copied, so a head tied to the embedding stays tied.
    """

    def __init__(self, projections: Iterable[nn.Module]) -> None:
        super().__init__()
        members = [projection for projection in projections if isinstance(projection, Projection)]
        biases = merged_biases(members)
        self.weight = merged([member.weight for member in members])
        self.bias = merged(biases) if biases else None
        find_at_once(self)

    def forward(
        self,
        x: torch.Tensor,
        norm: RMSNorm | None = None,
        residual: torch.Tensor | None = None,
        gate: torch.Tensor | None = None,
        activation: GatedOp | None = None,
    ) -> torch.Tensor:
        """x ``[T, in]`` to ``[T, out]``; with an activation of concatenated gate and up, to ``[T, out / 2]``."""
        return gemv.linear(x, self.weight, self.bias, norm, residual, activation)

    __call__ = forward  # skips nn.Module's hooks, which cost as much as a launch


class FusedNorm(RMSNorm):
    """A norm in one launch, together with the additions before or after it."""

    def __init__(self, norm: RMSNorm) -> None:
        nn.Module.__init__(self)
        self.weight, self.eps, self.offset = norm.weight, norm.eps, norm.offset
        find_at_once(self)

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        if torch.is_grad_enabled():  # the kernel has no gradients
            return super().forward(x, residual)
        return rms_norm(x, self.weight, self.eps, self.offset, residual)

    def after(self, post_norm: RMSNorm, y: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if torch.is_grad_enabled():
            return super().after(post_norm, y, residual)
        return add_rms_norm(y, residual, self.weight, self.eps, self.offset, post_norm)

    __call__ = forward


def fused(projections: Iterable[nn.Module]) -> Any:
    """The fused version of projections of the same x; classes other than :class:`Projection` provide their own."""
    members: list[Any] = list(projections)
    own = [member for member in members if not isinstance(member, Projection)]
    return own[0].fused(members) if own else FusedProjection(members)


def fused_part(part: nn.Module) -> nn.Module | None:
    """The fused version of a part of a block; None for a module that is not a part: modules inside it are fused
    instead.

    Besides :class:`Projection`, any class with a method ``fused`` counts as a projection.
    """
    # exercise 03.1x4: fuse each kind of part, so that a block has as few launches as possible
    # hint: a part is a group of projections, a norm, or a single projection
    # hint: MergedGroup(part, fused) is one product for a group; fused([part]) the fused version of one projection
    # hint: a projection that is quantized or sharded is not a Projection, but it has a method `fused`
    if isinstance(part, ProjectionGroup):
        return MergedGroup(part, fused)
    if isinstance(part, RMSNorm):
        return FusedNorm(part)
    is_projection = isinstance(part, Projection) or hasattr(part, "fused")
    return fused([part]) if is_projection else None
    # end exercise


def merged(tensors: Sequence[torch.Tensor]) -> nn.Parameter:
    """Concatenate the tensors along dimension 0; a single one is not copied."""
    if len(tensors) == 1 and isinstance(tensors[0], nn.Parameter) and tensors[0].is_contiguous():
        return tensors[0]
    return nn.Parameter(torch.cat([tensor.data for tensor in tensors]), requires_grad=False)


def fuse(model: CausalLM) -> CausalLM:
    """Replace, in place, the parts of every block and the head by their fused versions, and free unmerged matrices.

    Extra memory is needed for the merged matrices of one layer at a time. Raises ConfigError, and leaves the model
    unchanged, if the machine's GPU, Triton or compiler cannot run the kernels, or they do not support its head size.
    """
    check_launchable(model.device)
    if model.device.type == "cuda":
        check_head_size(model.config.head_dim)
    for block in model.blocks:
        replace_parts(block, fused_part)
        if model.device.type == "cuda":
            torch.cuda.empty_cache()  # the freed pieces are too small for the merge of the next layer
    model.head = fused([model.head])
    compile_for_prompts(model)
    return model


def compile_for_prompts(model: CausalLM) -> None:
    """Compile the kernel that only prompts of some lengths take, so that no request waits for it. It is the same for
    all layers."""
    for mlp in model.modules():
        if isinstance(mlp, GatedMLP) and isinstance(mlp.gate_up, MergedGroup):
            weight = getattr(mlp.gate_up.matrix, "weight", None)
            if isinstance(weight, torch.Tensor) and gated_gemm.can_compute(weight[:1], weight):
                gated_gemm.gated_gemm(weight[:1], weight, gemv.ACTIVATIONS[mlp.gated][0])
                return
