"""The cases of a decode step that have no weight matrix: the cache's write, attention, the sampler.

Introduced in phase 3.1. Invariant: that of :mod:`benchmarks.kernels.case`.
"""

from functools import partial
from typing import Any

import torch

from benchmarks.kernels.case import Case, Drawn
from benchmarks.kernels.cases import ModelShapes, Moved, NormOf
from shared.kernels.decode_attention import DecodeWorkspace, decode_attention
from shared.kernels.kv_write import kv_write
from shared.kernels.sampler import sample
from shared.models.attention import NormAndRotate
from shared.ops.attention import sdpa_attention
from shared.ops.rope import rope_table
from shared.sampling import sampler as sampler_op
from shared.sampling.params import SamplingParams
from shared.sampling.sampler import SamplingBatch, SamplingRow

NUM_POSITIONS = 4096  # rows of the RoPE table
DRAWING = SamplingParams(temperature=0.8, top_k=50, top_p=0.95)
LOGIT_SCALE = 3.0


def kv_write_case(shapes: ModelShapes, rows: int, device: torch.device) -> Case:
    """Norm, rotate and store ``rows`` tokens of one QKV result. Each set has a memory that they fill."""
    heads, D = shapes.block.heads, shapes.block.head_dim
    Hq, Hkv, _ = heads
    norm = shapes.block.qk.q_norm
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
    block = shapes.block
    Hq, Hkv, _ = block.heads
    D, scale, softcap = block.head_dim, block.scale, block.softcap
    seen = context if window is None else min(context, window)
    workspace = DecodeWorkspace.of(1, Hq, Hkv, D, context, device)
    regions = torch.zeros(1, dtype=torch.int32, device=device)
    lengths = torch.full((1,), context, dtype=torch.int32, device=device)

    def ours(q: Any, keys: Any, values: Any) -> torch.Tensor:
        about: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap}
        return decode_attention(q, keys, values, regions, lengths, **about, workspace=workspace)

    def op(q: Any, keys: Any, values: Any) -> torch.Tensor:
        k, v = keys[0, :, context - seen :], values[0, :, context - seen :]
        return sdpa_attention(q, k, v, scale=scale, softcap=softcap)

    memory = Drawn((1, Hkv, context, D))
    moved: Moved = (2 * seen * Hkv * D + 2 * Hq * D) * shapes.dtype.itemsize, "read"
    name = "decode_attention" if window is None else "decode_attention_windowed"
    described = f"{Hq} over {Hkv} heads of {D}" + (f", last {seen}" if window else "")
    return shapes.case(name, context, described, moved, ours, op, Drawn((1, Hq, D)), memory, memory)


def sampler_cases(shapes: ModelShapes, rows: int, device: torch.device) -> list[Case]:
    """A greedy batch, and one that draws with temperature, top-k and top-p."""
    V = shapes.vocab_size

    def case(kernel: str, described: str, params: SamplingParams) -> Case:
        drawing = [SamplingRow(params, seed=row, index=row) for row in range(rows)]
        batch = SamplingBatch.of(drawing, device=device)
        moved: Moved = rows * (V * shapes.dtype.itemsize + torch.int64.itemsize), "read"
        logits = Drawn((rows, V), partial(torch.Tensor.normal_, std=LOGIT_SCALE))
        ours, op = lambda x: sample(x, batch), lambda x: sampler_op.sample(x, batch)
        return shapes.case(kernel, rows, f"{V}, {described}", moved, ours, op, logits)

    drawn = f"temperature {DRAWING.temperature}, top-k {DRAWING.top_k}, top-p {DRAWING.top_p}"
    return [
        case("sampler_greedy", "arg-max", SamplingParams(temperature=0.0)),
        case("sampler_drawn", drawn, DRAWING),
    ]
