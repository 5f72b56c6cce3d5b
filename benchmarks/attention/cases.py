"""What the attention benchmark calls: decode over paged memory at real shapes, by our kernels. Introduced in phase 6.1.

Every set of inputs has queries, keys and values of its own; block tables, lengths and plan are one for all sets, as
they are for the layers of a step. Blocks lie in random order, and the pool holds nothing else.

Invariant: ``num_bytes`` counts what any implementation must move: each visible key and value, the queries, the results;
block tables, plans and partial states are an implementation's own loss.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch

from benchmarks.kernels.cases import Drawn, KernelCase
from shared.attention.descriptor import DevicePlan
from shared.attention.plan import plan_decode
from shared.engine.staging import Staging
from shared.kernels.decode_attention import DecodeWorkspace
from shared.kernels.paged_attention import paged_attention
from shared.kernels.planned_attention import attend_by_sequence, planned_decode
from shared.kernels.planned_tiling import DecodeTiling, decode_tiling
from shared.kernels.planned_workspace import PlannedWorkspace

BLOCK_SIZE = 16
Call = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class AttentionShape:
    """A decode step's attention in one layer, and what it has to reach on an H100."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    lengths: tuple[int, ...]
    target_gb_per_second: float | None = None
    target_us: float | None = None
    target_times_unsplit: float | None = None

    @property
    def num_sequences(self) -> int:
        return len(self.lengths)

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    @property
    def num_blocks(self) -> int:
        """Of the pool."""
        return sum(-(-length // BLOCK_SIZE) for length in self.lengths)

    def describe(self) -> str:
        """``32 over 8 heads of 64``."""
        return f"{self.num_heads} over {self.num_kv_heads} heads of {self.head_dim}"

    def num_bytes(self, itemsize: int) -> int:
        kv = 2 * sum(self.lengths) * self.num_kv_heads * self.head_dim
        return (kv + 2 * self.num_sequences * self.num_heads * self.head_dim) * itemsize


SHAPES = (
    AttentionShape("32x4096", 32, 8, 64, (4096,) * 32, target_gb_per_second=2400),
    AttentionShape("128x2048", 32, 8, 64, (2048,) * 128, target_gb_per_second=2400),
    AttentionShape("1x16384", 32, 8, 64, (16384,), target_gb_per_second=1700),
    AttentionShape("1x1024", 32, 8, 64, (1024,), target_us=8),
    AttentionShape("mixed", 32, 8, 64, (*[256] * 16, 16384, *[256] * 15), target_times_unsplit=3),
    AttentionShape("32x4096-d128", 32, 8, 128, (4096,) * 32, target_gb_per_second=2700),
)
DEMO_SHAPES = (
    AttentionShape("4x64", 4, 2, 16, (64,) * 4),
    AttentionShape("1x256", 4, 2, 16, (256,)),
    AttentionShape("mixed", 4, 2, 16, (16, 16, 256, 16)),
)


class PagedSequences:
    """The index arrays of a shape: blocks in random order; without a seed one behind the other."""

    def __init__(self, shape: AttentionShape, device: torch.device, seed: int | None) -> None:
        counts = -(-np.array(shape.lengths) // BLOCK_SIZE)
        order = np.arange(int(counts.sum()), dtype=np.int32)
        if seed is not None:
            np.random.default_rng(seed).shuffle(order)
        starts = counts.cumsum() - counts
        self.tables = torch.from_numpy(order).to(device)
        self.table_starts = torch.from_numpy(starts.astype(np.int32)).to(device)
        self.lengths = torch.tensor(shape.lengths, dtype=torch.int32, device=device)
        self.rows = [order[start : start + count].tolist() for start, count in zip(starts, counts, strict=True)]

    def arrays(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """As the launchers take them."""
        return self.tables, self.table_starts, self.lengths


def attention_case(
    name: str, shape: AttentionShape, sequences: PagedSequences, call: Call, dtype: torch.dtype
) -> KernelCase:
    """``call(q, keys, values)`` beside the op over each sequence's gathered blocks."""
    starts = sequences.table_starts.tolist()

    def eager(q: Any, keys: Any, values: Any) -> torch.Tensor:
        paged = (keys, values, sequences.tables, starts, list(shape.lengths), [1] * shape.num_sequences)
        return attend_by_sequence(q, *paged, shape.scale, None, None, torch.empty_like(q))

    memory = Drawn((shape.num_blocks, BLOCK_SIZE, shape.num_kv_heads, shape.head_dim))
    return KernelCase(
        kernel=name,
        size=shape.name,
        shape=shape.describe(),
        num_bytes=shape.num_bytes(dtype.itemsize),
        ceiling="read",
        ours=call,
        eager=eager,
        drawn=(Drawn((shape.num_sequences, shape.num_heads, shape.head_dim)), memory, memory),
        dtype=dtype,
    )


def report_settings(tiling: DecodeTiling) -> dict[str, Any]:
    """A tiling's settings by the names that reports have for them: there ``least_split`` is ``least_chunk``."""
    return {"least_chunk" if name == "least_split" else name: value for name, value in asdict(tiling).items()}


def planned_call(
    shape: AttentionShape,
    sequences: PagedSequences,
    tiling: DecodeTiling,
    *,
    is_split: bool = True,
) -> tuple[Call, dict[str, Any]]:
    """The planned kernel under this tiling, and what the plan came to; unsplit: one program a sequence and key head."""
    device = sequences.lengths.device
    grid = tiling.grid(shape.num_kv_heads, device)
    whole = -(-max(shape.lengths) // grid.unit) * grid.unit
    plan = plan_decode(shape.lengths, grid, split_size=None if is_split else whole)
    arrays = {str(n): array for n, array in enumerate(plan.arrays())}
    sent = DevicePlan.of(plan, list(Staging.for_arrays(device, arrays).send(arrays).values()))
    heads = (shape.num_heads, shape.num_kv_heads, shape.head_dim)
    workspace = PlannedWorkspace.of(plan.num_states, shape.num_sequences, *heads, device)

    def call(q: Any, keys: Any, values: Any) -> torch.Tensor:
        about: dict[str, Any] = {"scale": shape.scale, "tiling": tiling, "workspace": workspace}
        return planned_decode(q, keys, values, *sequences.arrays(), sent, **about)

    described = {"chunk_tokens": int(plan.split_size[0]), "num_items": int(plan.num_items[0])}
    return call, report_settings(tiling) | described


def variant_calls(
    shape: AttentionShape, sequences: PagedSequences, dtype: torch.dtype
) -> dict[str, tuple[Call, dict[str, Any]]]:
    """Our kernels: as an engine calls it; with the other way to merge; without what makes it fast; phase 6's."""
    heads = (shape.num_heads, shape.num_kv_heads, shape.head_dim)
    tiling = decode_tiling(shape.num_sequences, *heads[1:], dtype.itemsize)
    merged = "merge_launch" if tiling.is_arrival else "merge_arrival"
    workspace = DecodeWorkspace.of(shape.num_sequences, *heads, max(shape.lengths), sequences.lengths.device)

    def paged(q: Any, keys: Any, values: Any) -> torch.Tensor:
        return paged_attention(q, keys, values, *sequences.arrays(), scale=shape.scale, workspace=workspace)

    return {
        "planned": planned_call(shape, sequences, tiling),
        merged: planned_call(shape, sequences, replace(tiling, is_arrival=not tiling.is_arrival)),
        "unsplit": planned_call(shape, sequences, tiling, is_split=False),
        "paged": (paged, {"num_splits": workspace.num_splits}),
    }
