"""Blocks whose matrices are merged and whose operations are fused into kernels. Introduced in phase 3.1.

On a GPU a decode step is a row of launches, each of which must be asked for, started and waited for, most of them for
vectors of a few kilobytes. In the fused block a line is a launch: what reads the same input is one matrix (queries,
keys and values; gate and up), a norm is the prologue of the product behind it, an activation or the residual's addition
the epilogue of the product before it.

A Gemma block norms what attention and MLP give before adding it. That norm needs the whole row, which the programs of a
product have only between them, so it cannot be an epilogue; with the addition, and behind attention with the MLP's norm
too, it is a kernel between two products. So are addition and norm where rows are too many for the small products.

Invariants: a fused model computes what the plain one does, in the same order, and rounds less often; model and memory
meet as before, in ``kv.write`` and ``kv.attend``; on a CPU the launchers call the ops.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from shared.kernels import gemv
from shared.kernels.launch import check_launchable
from shared.kernels.rmsnorm import add_rms_norm, rms_norm
from shared.kernels.tiling import MAX_ROWS
from shared.models.causal_lm import CausalLM
from shared.models.norm import RMSNorm
from shared.models.projection import Projection
from shared.models.tokens import KVView, Tokens
from shared.ops.gated import GatedOp


class FusedProjection(nn.Module):
    """One matrix in the place of one :class:`Projection`, or of several that read the same x, their outputs abreast.

    The weight of a single projection is kept as it is, so a head that is tied to the embedding stays tied.
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
        """x ``[T, in]`` to ``[T, out]``; with an activation, of gate and up abreast, to ``[T, out / 2]``."""
        return gemv.linear(x, self.weight, self.bias, norm, residual, activation)

    __call__ = forward  # without the search for hooks, which takes as long as a launch


class FusedBlock(nn.Module):
    """The fused twin of any family's block; norms behind attention and MLP are there where the family has them."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        attention, mlp = block.attention, block.mlp
        self.layer, self.head_dim = attention.layer, attention.head_dim
        self.scale, self.window, self.softcap = attention.scale, attention.window, attention.softcap
        self.heads = [len(member.weight) // self.head_dim for member in attention.qkv.children()]  # Hq, Hkv, Hkv
        self.qk, self.gated = attention.qk, mlp.gated
        self.qkv, self.o_proj = FusedProjection(attention.qkv.children()), FusedProjection([attention.o_proj])
        self.gate_up, self.down_proj = FusedProjection(mlp.gate_up.children()), FusedProjection([mlp.down_proj])
        self.attention_norm, self.mlp_norm = block.attention_norm, block.mlp_norm
        self.post_attention_norm = getattr(block, "post_attention_norm", None)
        self.post_mlp_norm = getattr(block, "post_mlp_norm", None)

    def forward(self, x: torch.Tensor, tokens: Tokens, kv: KVView) -> torch.Tensor:
        """x ``[T, H]`` to a new tensor ``[T, H]``."""
        qkv = self.qkv(x, norm=self.attention_norm).view(x.shape[0], -1, self.head_dim)
        q, k, v = qkv.split_with_sizes(self.heads, dim=1)  # [T, Hq, D], [T, Hkv, D] twice
        q = kv.write(self.layer, q, k, v, tokens.positions, self.qk)
        out = kv.attend(self.layer, q, scale=self.scale, window=self.window, softcap=self.softcap).flatten(1)

        # exercise 03.1x4: the rest of the block, from attention's output on, in as few launches as there can be
        # hint: without a post-norm the residual goes into o_proj, and the norm into gate_up
        # hint: add_rms_norm gives back the normed sum and the sum; it also takes a post-norm
        # hint: what Gemma's last norm gives is added to x; rms_norm takes a residual
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


def merged(tensors: list[nn.Parameter]) -> nn.Parameter:
    """The tensors one below the other; a single one is not copied."""
    if len(tensors) == 1 and tensors[0].is_contiguous():
        return tensors[0]
    return nn.Parameter(torch.cat([tensor.data for tensor in tensors]), requires_grad=False)


def fuse(model: CausalLM) -> CausalLM:
    """Replace, in place, every block and the head by its fused twin, and free the matrices that were merged.

    Beside the model, memory holds the merged matrices of one layer at a time. Raises ConfigError, with the model as it
    was, if this machine's GPU, Triton or compiler cannot run the kernels.
    """
    check_launchable(model.device)
    for layer in range(len(model.blocks)):
        model.blocks[layer] = FusedBlock(model.blocks[layer])
        if model.device.type == "cuda":
            torch.cuda.empty_cache()  # freed pieces are smaller than what the next layer merges, and would pile up
    model.head = FusedProjection([model.head])  # type: ignore[assignment]
    return model
