"""Blocks with merged matrices and operations fused into kernels. Introduced in phase 3.1.

On a GPU a decode step is a sequence of launches, each with its overhead, most of them for vectors of a few kilobytes.
In the fused block each line is one launch: matrices that read the same input are merged (queries, keys and values; gate
and up), a norm is the prologue of the next product, an activation or the residual addition the epilogue of the previous
one. (In steps of several tokens the product launches the norm before it: see :mod:`shared.kernels.gemv`.)

A Gemma block norms the outputs of attention and MLP before adding them. That norm needs the whole row, which no single
program of a product has, so it cannot be an epilogue; it is a kernel between two products, together with the addition,
and after attention with the MLP's norm too. So are addition and norm if there are too many rows for the small products.

Invariants: a fused model computes the same operations in the same order and rounds less often; it still calls
``kv.write`` and ``kv.attend``; on a CPU the launchers call the ops.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from shared.kernels import gemv
from shared.kernels.launch import check_head_size, check_launchable
from shared.kernels.rmsnorm import add_rms_norm, rms_norm
from shared.kernels.tiling import MAX_ROWS
from shared.models.causal_lm import CausalLM
from shared.models.norm import RMSNorm
from shared.models.projection import Projection
from shared.models.tokens import KVView, Tokens
from shared.ops.gated import GatedOp


class FusedProjection(nn.Module):
    """One matrix that replaces one :class:`Projection`, or several of the same x, with their outputs concatenated.

    The weight of a single projection is not copied, so a head tied to the embedding stays tied.
    """

    def __init__(self, projections: Iterable[nn.Module]) -> None:
        super().__init__()
        members = [projection for projection in projections if isinstance(projection, Projection)]
        biases = [member.bias for member in members if member.bias is not None]
        self.weight = merged([member.weight for member in members])
        self.bias = merged(biases) if biases else None

    def forward(
        self,
        x: torch.Tensor,
        norm: RMSNorm | None = None,
        residual: torch.Tensor | None = None,
        activation: GatedOp | None = None,
    ) -> torch.Tensor:
        """x ``[T, in]`` to ``[T, out]``; with an activation of concatenated gate and up, to ``[T, out / 2]``."""
        return gemv.linear(x, self.weight, self.bias, norm, residual, activation)

    __call__ = forward  # skips nn.Module's hooks, which cost as much as a launch


class FusedBlock(nn.Module):
    """The fused version of any family's block; post-norms exist if the family has them."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        attention, mlp = block.attention, block.mlp
        self.layer, self.head_dim = attention.layer, attention.head_dim
        self.scale, self.window, self.softcap = attention.scale, attention.window, attention.softcap
        self.heads = [len(member.weight) // self.head_dim for member in attention.qkv.children()]  # Hq, Hkv, Hkv
        self.qk, self.gated = attention.qk, mlp.gated
        self.qkv, self.o_proj = fused(attention.qkv.children()), fused([attention.o_proj])
        self.gate_up, self.down_proj = fused(mlp.gate_up.children()), fused([mlp.down_proj])
        self.attention_norm, self.mlp_norm = block.attention_norm, block.mlp_norm
        self.post_attention_norm = getattr(block, "post_attention_norm", None)
        self.post_mlp_norm = getattr(block, "post_mlp_norm", None)

    def forward(self, x: torch.Tensor, tokens: Tokens, kv: KVView) -> torch.Tensor:
        """x ``[T, H]`` to a new tensor ``[T, H]``."""
        qkv = self.qkv(x, norm=self.attention_norm).view(x.shape[0], -1, self.head_dim)
        q, k, v = qkv.split_with_sizes(self.heads, dim=1)  # [T, Hq, D], [T, Hkv, D] twice
        q = kv.write(self.layer, q, k, v, tokens.positions, self.qk)
        out = kv.attend(self.layer, q, scale=self.scale, window=self.window, softcap=self.softcap).flatten(1)

        # exercise 03.1x4: the rest of the block after attention, in as few launches as possible
        # hint: without a post-norm the residual goes into o_proj, and the norm into gate_up
        # hint: add_rms_norm returns the normed sum and the sum; it also takes a post-norm
        # hint: the output of Gemma's last norm is added to x; rms_norm takes a residual
        norm, post_norm = self.mlp_norm, self.post_attention_norm
        if post_norm is None and x.shape[0] <= MAX_ROWS:
            x = self.o_proj(out, residual=x)
            h = self.gate_up(x, norm=norm, activation=self.gated)
        else:
            normed, x = add_rms_norm(self.o_proj(out), x, norm.weight, norm.eps, norm.offset, post_norm)
            h = self.gate_up(normed, activation=self.gated)

        norm = self.post_mlp_norm
        if norm is None:
            return self.down_proj(h, residual=x)
        return rms_norm(self.down_proj(h), norm.weight, norm.eps, norm.offset, residual=x)
        # end exercise

    __call__ = forward


def fused(projections: Iterable[nn.Module]) -> Any:
    """The fused version of projections of the same x; other classes than :class:`Projection` bring their own."""
    members: list[Any] = list(projections)
    own = [member for member in members if not isinstance(member, Projection)]
    return own[0].fused(members) if own else FusedProjection(members)


def merged(tensors: list[nn.Parameter]) -> nn.Parameter:
    """Concatenate the tensors along dimension 0; a single one is not copied."""
    if len(tensors) == 1 and tensors[0].is_contiguous():
        return tensors[0]
    return nn.Parameter(torch.cat([tensor.data for tensor in tensors]), requires_grad=False)


def fuse(model: CausalLM) -> CausalLM:
    """Replace, in place, every block and the head by its fused version, and free the unmerged matrices.

    Extra memory is needed for the merged matrices of one layer at a time. Raises ConfigError, and leaves the model
    unchanged, if the machine's GPU, Triton or compiler cannot run the kernels, or they do not take its head size.
    """
    check_launchable(model.device)
    if model.device.type == "cuda":
        check_head_size(model.config.head_dim)
    for layer in range(len(model.blocks)):
        model.blocks[layer] = FusedBlock(model.blocks[layer])
        if model.device.type == "cuda":
            torch.cuda.empty_cache()  # freed pieces are too small for the next layer's merge
    model.head = fused([model.head])
    return model
