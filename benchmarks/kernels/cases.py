"""The kernels of a fused block as a decode step calls them, and the same work in eager PyTorch.

Introduced in phase 3.1. Here are the products and the norms;
:mod:`benchmarks.kernels.decode_cases` has what a step does without a weight matrix. Sizes, norms and epilogues are read
off the model's own fused block, made without memory on the meta device, so a case cannot drift from what an engine
runs. Ours is a launcher of ``shared.kernels``; ``op`` are the ops of ``shared.ops`` that a plain block would call, with
one matrix product where ours has one. Invariant: that of :mod:`benchmarks.kernels.case`.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F

from benchmarks.kernels.case import Call, Case, Drawn, Peer
from shared.kernels import gemv
from shared.kernels.rmsnorm import add_rms_norm, rms_norm
from shared.models.causal_lm import CausalLM
from shared.models.config import ModelConfig
from shared.models.fused import FusedBlock, fuse
from shared.ops import rmsnorm as norm_op
from shared.ops.gated import GatedOp

PEERS = ("eager", "compiled")
Moved = tuple[int, Literal["read", "copy"]]
"""Bytes that a case moves, and the ceiling that it is measured against."""


@dataclass(frozen=True)
class NormOf:
    """A norm as the launchers take it."""

    weight: torch.Tensor
    eps: float
    offset: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return norm_op.rms_norm(x, self.weight, self.eps, self.offset)


class ModelShapes:
    """The sizes of one model, read off its fused twin, and the dtype that its kernels compute in."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        self.config, self.dtype, self.vocab_size = config, dtype, config.vocab_size
        model = fuse(CausalLM(config, max_positions=1, device="meta"))
        block = model.blocks[0]
        assert isinstance(block, FusedBlock)
        self.block = block
        self.hidden_size, self.eps, self.offset = len(model.norm.weight), model.norm.eps, model.norm.offset
        self.intermediate_size = block.down_proj.weight.shape[1]

    def fill_norm(self, weights: torch.Tensor) -> None:
        """What the weights of a norm are drawn from: near the one that leaves a number as it is."""
        weights.normal_(1.0 - self.offset, 0.1)

    def case(self, name: str, size: int, about: str, moved: Moved, ours: Call, op: Call, *drawn: Drawn | None) -> Case:
        """A kernel beside its op, eager and compiled; ``size`` counts rows, for attention tokens of context."""
        peers = {"eager": Peer(lambda: op), "compiled": Peer(lambda: compiled(op))}
        return Case(name, str(size), about, *moved, {"ours": ours}, op, drawn, self.dtype, peers)


def compiled(op: Call) -> Call:
    """``torch.compile`` of an op, for these shapes; what was compiled before is forgotten, since PyTorch falls back to
    eager when one function has been compiled for too many shapes."""
    torch.compiler.reset()
    return torch.compile(op, dynamic=False)


def projection_cases(shapes: ModelShapes, rows: int) -> list[Case]:
    """qkv, o, gate_up, down and head with the prologue and epilogue that the fused block gives each."""
    block, H, I = shapes.block, shapes.hidden_size, shapes.intermediate_size  # noqa: E741
    is_added_at_once = block.post_attention_norm is None
    return [
        projection_case(shapes, rows, "qkv", len(block.qkv.weight), H, has_norm=True),
        projection_case(shapes, rows, "o", H, block.o_proj.weight.shape[1], has_residual=is_added_at_once),
        projection_case(shapes, rows, "gate_up", I, H, has_norm=is_added_at_once, activation=block.gated),
        projection_case(shapes, rows, "down", H, I, has_residual=block.post_mlp_norm is None),
        projection_case(shapes, rows, "head", shapes.vocab_size, H, has_norm=True),
    ]


def projection_case(
    shapes: ModelShapes,
    rows: int,
    kernel: str,
    N: int,
    K: int,
    *,
    has_norm: bool = False,
    has_residual: bool = False,
    activation: GatedOp | None = None,
) -> Case:
    """A product of the GEMV family: a weight matrix ``[N, K]``, or ``[2N, K]`` under an activation."""

    def ours(x: Any, weight: Any, norm_weight: Any, residual: Any) -> torch.Tensor:
        norm = None if norm_weight is None else NormOf(norm_weight, shapes.eps, shapes.offset)
        return gemv.linear(x, weight, None, norm, residual, activation)

    def op(x: Any, weight: Any, norm_weight: Any, residual: Any) -> torch.Tensor:
        x = x if norm_weight is None else norm_op.rms_norm(x, norm_weight, shapes.eps, shapes.offset)
        y = F.linear(x, weight)
        if activation is not None:
            y = activation(y[:, :N], y[:, N:])
        return y if residual is None else residual + y

    weight_rows = N if activation is None else 2 * N
    described = "norm, " * has_norm + f"{K} → {weight_rows}" + (f", {activation.__name__}" if activation else "")
    numbers = weight_rows * K + rows * (K + N) + K * has_norm + rows * N * has_residual
    drawn = (
        Drawn((rows, K)),
        Drawn((weight_rows, K), partial(torch.Tensor.normal_, std=K**-0.5)),
        Drawn((K,), shapes.fill_norm) if has_norm else None,
        Drawn((rows, N)) if has_residual else None,
    )
    moved: Moved = numbers * shapes.dtype.itemsize, "read"
    return shapes.case(kernel, rows, described + ", + residual" * has_residual, moved, ours, op, *drawn)


def norm_cases(shapes: ModelShapes, rows: int) -> list[Case]:
    """The norms behind attention and MLP, for a family that has them; elsewhere norms are prologues of products."""
    if shapes.block.post_mlp_norm is None:
        return []
    n, eps, offset = shapes.hidden_size, shapes.eps, shapes.offset

    def norm(x: Any, weight: Any, residual: Any) -> torch.Tensor:
        return rms_norm(x, weight, eps, offset, residual)

    def norm_by_op(x: Any, weight: Any, residual: Any) -> torch.Tensor:
        return residual + norm_op.rms_norm(x, weight, eps, offset)

    def add(x: Any, residual: Any, weight: Any, post: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return add_rms_norm(x, residual, weight, eps, offset, NormOf(post, eps, offset))

    def add_by_op(x: Any, residual: Any, weight: Any, post: Any) -> tuple[torch.Tensor, torch.Tensor]:
        summed = residual + norm_op.rms_norm(x, post, eps, offset)
        return norm_op.rms_norm(summed, weight, eps, offset), summed

    x, weight = Drawn((rows, n)), Drawn((n,), shapes.fill_norm)
    moved: Moved = (3 * rows + 1) * n * shapes.dtype.itemsize, "copy"
    added: Moved = (4 * rows + 2) * n * shapes.dtype.itemsize, "copy"
    return [
        shapes.case("rms_norm", rows, f"{n}, + residual", moved, norm, norm_by_op, x, weight, x),
        shapes.case("add_rms_norm", rows, f"norm, + {n}, norm", added, add, add_by_op, x, x, weight, weight),
    ]
