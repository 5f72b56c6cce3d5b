"""The kernels of a fused block as a decode step calls them, compared with the same work in eager PyTorch.

Introduced in phase 3.1. Sizes, norms and epilogues are taken from the model's own fused block, made on the meta device.
Invariant: that of :mod:`benchmarks.kernels.case`.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F

from benchmarks.kernels.case import Call, Case, Drawn, Peer
from shared.kernels.attention.decode_attention import DecodeWorkspace, decode_attention
from shared.kernels.attention.kv_write import kv_write
from shared.kernels.products import gemv
from shared.kernels.products.rmsnorm import add_rms_norm, rms_norm
from shared.kernels.sampling.sampler import sample
from shared.models.attention import NormAndRotate
from shared.models.causal_lm import CausalLM
from shared.models.config import ModelConfig
from shared.models.fused import fuse
from shared.ops import rmsnorm as norm_op
from shared.ops.attention import sdpa_attention
from shared.ops.gated import GatedOp
from shared.ops.rope import rope_table
from shared.sampling import sampler as sampler_op
from shared.sampling.params import SamplingParams
from shared.sampling.sampler import SamplingBatch, SamplingRow

PEERS = ("eager", "compiled")
Moved = tuple[int, Literal["read", "copy"]]
"""Bytes that a case moves, and the ceiling that it is measured against."""
NUM_POSITIONS = 4096  # rows of the RoPE table
DRAWING = SamplingParams(temperature=0.8, top_k=50, top_p=0.95)
LOGIT_SCALE = 3.0


@dataclass(frozen=True)
class NormOf:
    """A norm in the form that the launchers take."""

    weight: torch.Tensor
    eps: float
    offset: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return norm_op.rms_norm(x, self.weight, self.eps, self.offset)


class ModelShapes:
    """The sizes of one model, read off its fused version, and the dtype that its kernels compute in."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        self.config, self.dtype, self.vocab_size = config, dtype, config.vocab_size
        model = fuse(CausalLM(config, max_positions=1, device="meta"))
        block: Any = model.blocks[0]
        self.block, self.has_post_norms = block, hasattr(block, "post_mlp_norm")
        self.hidden_size, self.eps, self.offset = len(model.norm.weight), model.norm.eps, model.norm.offset
        self.intermediate_size = block.mlp.down_proj.weight.shape[1]

    def fill_norm(self, weights: torch.Tensor) -> None:
        """The numbers that a norm's weights are generated around: the one that leaves a number unchanged."""
        weights.normal_(1.0 - self.offset, 0.1)

    def case(self, name: str, size: int, shape: str, moved: Moved, ours: Call, op: Call, *drawn: Drawn | None) -> Case:
        """A kernel, and its op in eager and compiled form; ``size`` counts rows, for attention tokens of context."""
        peers = {"eager": Peer(lambda: op), "compiled": Peer(lambda: compiled(op))}
        return Case(name, str(size), shape, *moved, {"ours": ours}, op, drawn, self.dtype, peers)


def compiled(op: Call) -> Call:
    """``torch.compile`` of an op for only these shapes: a function compiled for too many shapes falls back to eager."""
    torch.compiler.reset()
    return torch.compile(op, dynamic=False)


def projection_cases(shapes: ModelShapes, rows: int) -> list[Case]:
    """qkv, o, gate_up, down and head, each with the prologue and epilogue that the fused block gives it."""
    block, H, I = shapes.block, shapes.hidden_size, shapes.intermediate_size  # noqa: E741
    is_added_at_once = not shapes.has_post_norms
    return [
        projection_case(shapes, rows, "qkv", len(block.attention.qkv.matrix.weight), H, has_norm=True),
        projection_case(shapes, rows, "o", H, block.attention.o_proj.weight.shape[1], has_residual=is_added_at_once),
        projection_case(shapes, rows, "gate_up", I, H, has_norm=is_added_at_once, activation=block.mlp.gated),
        projection_case(shapes, rows, "down", H, I, has_residual=is_added_at_once),
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
    """The norms after attention and MLP, for a family that has them; in other families norms are prologues of
    products."""
    if not shapes.has_post_norms:
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


def kv_write_case(shapes: ModelShapes, rows: int, device: torch.device) -> Case:
    """Norm, rotate and store ``rows`` tokens of one QKV result. Each set has its own memory, which the calls fill."""
    attention = shapes.block.attention
    D, heads = attention.head_dim, [size // attention.head_dim for size in attention.qkv.sizes]
    Hq, Hkv, _ = heads
    norm = attention.qk.q_norm
    table = rope_table(shapes.config.rope, D, min(NUM_POSITIONS, shapes.config.max_position_embeddings), device)

    def transform(*weights: Any) -> NormAndRotate:
        norms: Any = weights if norm is None else [NormOf(weight, norm.eps, norm.offset) for weight in weights]
        return NormAndRotate(table, *norms)

    def ours(qkv: Any, positions: Any, offsets: Any, keys: Any, values: Any, *weights: Any) -> tuple[torch.Tensor, ...]:
        q, k, v = qkv.split(heads, dim=1)
        return kv_write(q, k, v, positions, transform(*weights), keys, values, offsets, rows * D), keys, values

    def op(qkv: Any, positions: Any, offsets: Any, keys: Any, values: Any, *weights: Any) -> tuple[torch.Tensor, ...]:
        q, k, v = qkv.split(heads, dim=1)
        q, k = transform(*weights).forward(q, k, positions)
        keys[0].transpose(0, 1).copy_(k)
        values[0].transpose(0, 1).copy_(v)
        return q, keys, values

    def fill_offsets(offsets: torch.Tensor) -> None:
        offsets.copy_(torch.arange(rows, device=device) * D)

    memory = Drawn((1, Hkv, rows, D))
    weight = None if norm is None else Drawn((D,), shapes.fill_norm)
    numbers = 2 * rows * sum(heads) * D + (0 if norm is None else 2 * D)
    angles = rows * D * table.element_size()  # a cosine and a sine for each pair of numbers
    moved: Moved = numbers * shapes.dtype.itemsize + angles + 2 * rows * torch.int64.itemsize, "copy"
    tokens = (
        Drawn((rows, sum(heads), D)),
        Drawn((rows,), lambda positions: positions.random_(len(table)), torch.int64),
        Drawn((rows,), fill_offsets, torch.int64),
    )
    described = f"{'norm, ' if norm else ''}{Hq} + 2 × {Hkv} heads of {D}"
    return shapes.case("kv_write", rows, described, moved, ours, op, *tokens, memory, memory, weight, weight)


def attention_case(shapes: ModelShapes, context: int, window: int | None, device: torch.device) -> Case:
    """One sequence of ``context`` tokens; with a window the kernel reads the last ``window`` of them."""
    attention = shapes.block.attention
    D, scale, softcap = attention.head_dim, attention.scale, attention.softcap
    Hq, Hkv, _ = (size // D for size in attention.qkv.sizes)
    seen = context if window is None else min(context, window)
    workspace = DecodeWorkspace.of(1, Hq, Hkv, D, context, device)
    regions = torch.zeros(1, dtype=torch.int32, device=device)
    lengths = torch.full((1,), context, dtype=torch.int32, device=device)

    def ours(q: Any, keys: Any, values: Any) -> torch.Tensor:
        options: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap}
        return decode_attention(q, keys, values, regions, lengths, **options, workspace=workspace)

    def op(q: Any, keys: Any, values: Any) -> torch.Tensor:
        k, v = keys[0, :, context - seen :], values[0, :, context - seen :]
        return sdpa_attention(q, k, v, scale=scale, softcap=softcap)

    memory = Drawn((1, Hkv, context, D))
    moved: Moved = (2 * seen * Hkv * D + 2 * Hq * D) * shapes.dtype.itemsize, "read"
    name = "decode_attention" if window is None else "decode_attention_windowed"
    described = f"{Hq} over {Hkv} heads of {D}" + (f", last {seen}" if window else "")
    return shapes.case(name, context, described, moved, ours, op, Drawn((1, Hq, D)), memory, memory)


def sampler_cases(shapes: ModelShapes, rows: int, device: torch.device) -> list[Case]:
    """A greedy batch, and one that samples with temperature, top-k and top-p."""
    V = shapes.vocab_size

    def case(kernel: str, described: str, params: SamplingParams) -> Case:
        drawing = [SamplingRow(params, seed=row, index=row) for row in range(rows)]
        batch = SamplingBatch.of(drawing, device=device)
        moved: Moved = rows * (V * shapes.dtype.itemsize + torch.int64.itemsize), "read"
        logits = Drawn((rows, V), partial(torch.Tensor.normal_, std=LOGIT_SCALE))
        ours, op = lambda x: sample(x, batch), lambda x: sampler_op.sample(x, batch)
        return shapes.case(kernel, rows, f"{V}, {described}", moved, ours, op, logits)

    drawn = f"temperature {DRAWING.temperature}, top-k {DRAWING.top_k}, top-p {DRAWING.top_p}"
    return [case("sampler_greedy", "arg-max", SamplingParams(temperature=0.0)), case("sampler_drawn", drawn, DRAWING)]
