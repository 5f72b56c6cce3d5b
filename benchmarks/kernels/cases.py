"""What the kernel benchmark calls: each kernel as a decode step calls it, and the same work in eager PyTorch.

Introduced in phase 3.1. Here are the products, the norms and the activation;
:mod:`benchmarks.kernels.decode_cases` has what a step does without a weight matrix. Sizes, norms and epilogues are read
off the model's own fused block, made without memory on the meta device, so a case cannot drift from what an engine
runs. ``ours`` is a launcher of ``shared.kernels``; ``eager`` is the ops of ``shared.ops`` that a plain block would
call, with one matrix product where ours has one. Both take the same inputs and give the same results.

Invariant: ``num_bytes`` counts what any implementation must move, each input read once and each result written once;
what a kernel moves besides (partial results, a second pass) is its own loss.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F

from benchmarks.device.graph_timing import Inputs, rotated_tensors
from shared.kernels import gemv
from shared.kernels.rmsnorm import add_rms_norm, rms_norm
from shared.kernels.tiling import Tiling
from shared.models.causal_lm import CausalLM
from shared.models.config import ModelConfig
from shared.models.fused import FusedBlock, fuse
from shared.ops import rmsnorm as norm_op
from shared.ops.gated import GatedOp


def normal(scale: float = 1.0, mean: float = 0.0) -> Callable[[torch.Tensor], Any]:
    """Fills a tensor with normal numbers."""
    return lambda rows: rows.normal_(mean, scale)


STANDARD_NORMAL = normal()


@dataclass(frozen=True)
class Drawn:
    """An input that every set has of its own; dtype None is the model's."""

    shape: tuple[int, ...]
    fill: Callable[[torch.Tensor], Any] = STANDARD_NORMAL
    dtype: torch.dtype | None = None


@dataclass(frozen=True)
class KernelCase:
    """One kernel at one size: ``size`` counts rows, or for attention the tokens of context."""

    kernel: str
    size: str
    shape: str  # for a reader
    num_bytes: int
    ceiling: Literal["read", "copy"]  # what it is measured against: does it read nearly everything it moves?
    ours: Callable[..., Any]
    eager: Callable[..., Any]
    drawn: tuple[Drawn | None, ...]
    dtype: torch.dtype

    @property
    def set_bytes(self) -> int:
        """Bytes of one set of inputs."""
        return sum(torch.Size(one.shape).numel() * (one.dtype or self.dtype).itemsize for one in self.drawn if one)

    def draw(self, num_sets: int, device: torch.device) -> list[Inputs]:
        """Fresh sets of inputs, from the device's default generator."""
        columns = [
            [None] * num_sets
            if one is None
            else rotated_tensors(num_sets, one.shape, one.dtype or self.dtype, device, one.fill)
            for one in self.drawn
        ]
        return list(zip(*columns, strict=True))


@dataclass(frozen=True)
class NormOf:
    """A norm as the launchers take it."""

    weight: torch.Tensor
    eps: float
    offset: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return norm_op.rms_norm(x, self.weight, self.eps, self.offset)


@dataclass(frozen=True)
class ProjectionShape:
    """A weight matrix as its block calls it: ``[N, K]``, or ``[2N, K]`` under an activation."""

    kernel: str
    N: int
    K: int
    eps: float
    offset: float
    has_norm: bool = False
    has_residual: bool = False
    activation: GatedOp | None = None

    @property
    def weight_rows(self) -> int:
        """Rows of the matrix."""
        return self.N if self.activation is None else 2 * self.N

    def describe(self) -> str:
        """``norm, 2048 → 8192, swiglu``: prologue, product, epilogue."""
        parts = ["norm"] if self.has_norm else []
        parts.append(f"{self.K} → {self.weight_rows}")
        parts += [self.activation.__name__] if self.activation else []
        return ", ".join([*parts, "+ residual"] if self.has_residual else parts)


class ModelShapes:
    """The sizes of one model, read off its fused twin."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        model = fuse(CausalLM(config, max_positions=1, device="meta"))
        block = model.blocks[0]
        assert isinstance(block, FusedBlock)
        self.block = block
        self.norm = model.norm
        self.vocab_size = len(model.head.weight)

    @property
    def hidden_size(self) -> int:
        return len(self.norm.weight)

    def projections(self) -> list[ProjectionShape]:
        """qkv, o, gate_up, down and head with the prologue and epilogue that the fused block gives each."""
        block = self.block
        about: dict[str, Any] = {"eps": self.norm.eps, "offset": self.norm.offset}
        H, I = self.hidden_size, block.down_proj.weight.shape[1]  # noqa: E741
        is_added_at_once = block.post_attention_norm is None
        return [
            ProjectionShape("qkv", len(block.qkv.weight), H, **about, has_norm=True),
            ProjectionShape("o", H, block.o_proj.weight.shape[1], **about, has_residual=is_added_at_once),
            ProjectionShape("gate_up", I, H, **about, has_norm=is_added_at_once, activation=block.gated),
            ProjectionShape("down", H, I, **about, has_residual=block.post_mlp_norm is None),
            ProjectionShape("head", self.vocab_size, H, **about, has_norm=True),
        ]


def projection_case(shape: ProjectionShape, rows: int, dtype: torch.dtype, cut: Tiling | None = None) -> KernelCase:
    """A product of the GEMV family; ``cut`` takes the place of the table's tiling."""
    N, K, eps, offset, activation = shape.N, shape.K, shape.eps, shape.offset, shape.activation

    def ours(x: Any, weight: Any, norm_weight: Any, residual: Any) -> torch.Tensor:
        norm = None if norm_weight is None else NormOf(norm_weight, eps, offset)
        return gemv.linear(x, weight, None, norm, residual, activation, cut)

    def eager(x: Any, weight: Any, norm_weight: Any, residual: Any) -> torch.Tensor:
        if norm_weight is not None:
            x = norm_op.rms_norm(x, norm_weight, eps, offset)
        y = F.linear(x, weight)
        if activation is not None:
            y = activation(y[:, :N], y[:, N:])
        return y if residual is None else residual + y

    drawn = (
        Drawn((rows, K)),
        Drawn((shape.weight_rows, K), normal(K**-0.5)),
        Drawn((K,), normal(0.1, 1.0 - offset)) if shape.has_norm else None,
        Drawn((rows, N)) if shape.has_residual else None,
    )
    numbers = shape.weight_rows * K + rows * (K + N) + K * shape.has_norm + rows * N * shape.has_residual
    num_bytes = numbers * dtype.itemsize
    return KernelCase(shape.kernel, str(rows), shape.describe(), num_bytes, "read", ours, eager, drawn, dtype)


def norm_cases(shapes: ModelShapes, rows: int, dtype: torch.dtype) -> list[KernelCase]:
    """rms_norm, and add_rms_norm; for a family that norms behind attention and MLP as its block calls them."""
    n, eps, offset = shapes.hidden_size, shapes.norm.eps, shapes.norm.offset
    has_post_norm = shapes.block.post_mlp_norm is not None

    def norm(x: Any, weight: Any, residual: Any) -> torch.Tensor:
        return rms_norm(x, weight, eps, offset, residual)

    def eager_norm(x: Any, weight: Any, residual: Any) -> torch.Tensor:
        y = norm_op.rms_norm(x, weight, eps, offset)
        return y if residual is None else residual + y

    def add(x: Any, residual: Any, weight: Any, post: Any) -> tuple[torch.Tensor, torch.Tensor]:
        post_norm = None if post is None else NormOf(post, eps, offset)
        return add_rms_norm(x, residual, weight, eps, offset, post_norm)

    def eager_add(x: Any, residual: Any, weight: Any, post: Any) -> tuple[torch.Tensor, torch.Tensor]:
        summed = residual + (x if post is None else norm_op.rms_norm(x, post, eps, offset))
        return norm_op.rms_norm(summed, weight, eps, offset), summed

    x, weight = Drawn((rows, n)), Drawn((n,), normal(0.1, 1.0 - offset))
    residual, post = (x, weight) if has_post_norm else (None, None)
    size, itemsize = str(rows), dtype.itemsize
    norm_bytes = ((3 if has_post_norm else 2) * rows * n + n) * itemsize
    add_bytes = (4 * rows * n + (2 if has_post_norm else 1) * n) * itemsize
    described = f"{n}, + residual" if has_post_norm else f"{n}"
    added = f"norm, + {n}, norm" if has_post_norm else f"+ {n}, norm"
    return [
        KernelCase("rms_norm", size, described, norm_bytes, "copy", norm, eager_norm, (x, weight, residual), dtype),
        KernelCase("add_rms_norm", size, added, add_bytes, "copy", add, eager_add, (x, x, weight, post), dtype),
    ]


def gated_case(shapes: ModelShapes, rows: int, dtype: torch.dtype) -> KernelCase:
    """The activation as a launch of its own, over gate and up abreast."""
    n, op = shapes.block.down_proj.weight.shape[1], shapes.block.gated
    _, launcher = gemv.ACTIVATIONS[op]
    name = op.__name__
    return KernelCase(
        kernel="gated",
        size=str(rows),
        shape=f"{name}, 2 × {n} → {n}",
        num_bytes=3 * rows * n * dtype.itemsize,
        ceiling="copy",
        ours=lambda gate_up: launcher(gate_up[:, :n], gate_up[:, n:]),
        eager=lambda gate_up: op(gate_up[:, :n], gate_up[:, n:]),
        drawn=(Drawn((rows, 2 * n)),),
        dtype=dtype,
    )
