"""Decode attention over a paged KV cache at real shapes, by our kernels. Introduced in phase 6.1.

Every set of inputs has queries, keys and values of its own; block tables, lengths and plan are the same for all sets,
as they are for the layers of a step. Blocks lie in random order, and the pool holds nothing else. Invariant: that of
:mod:`benchmarks.kernels.case`; block tables, plans and partial states are no bytes that must move.
"""

from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch

from benchmarks.kernels.case import Call
from shared.attention.descriptor import DevicePlan
from shared.attention.plan import plan_decode
from shared.engine.staging import Staging
from shared.kernels.decode_attention import DecodeWorkspace
from shared.kernels.paged_attention import paged_attention
from shared.kernels.planned_attention import attend_by_sequence, planned_decode
from shared.kernels.planned_tiling import DecodeTiling, decode_tiling
from shared.kernels.planned_workspace import PlannedWorkspace

BLOCK_SIZE = 16


@dataclass(frozen=True)
class AttentionShape:
    """A decode step's attention in one layer."""

    name: str
    heads: tuple[int, int, int]  # of queries, of keys, and their size
    lengths: tuple[int, ...]

    @property
    def num_sequences(self) -> int:
        return len(self.lengths)

    @property
    def scale(self) -> float:
        return float(self.heads[2] ** -0.5)

    def num_bytes(self, itemsize: int) -> int:
        """Of each visible key and value, the queries and the results."""
        Hq, Hkv, D = self.heads
        return 2 * (sum(self.lengths) * Hkv + self.num_sequences * Hq) * D * itemsize


SHAPES = (
    AttentionShape("32x4096", (32, 8, 64), (4096,) * 32),
    AttentionShape("128x2048", (32, 8, 64), (2048,) * 128),
    AttentionShape("1x16384", (32, 8, 64), (16384,)),
    AttentionShape("1x1024", (32, 8, 64), (1024,)),
    AttentionShape("mixed", (32, 8, 64), (*[256] * 16, 16384, *[256] * 15)),
    AttentionShape("32x4096-d128", (32, 8, 128), (4096,) * 32),
)
DEMO_SHAPES = (
    AttentionShape("4x64", (4, 2, 16), (64,) * 4),
    AttentionShape("1x256", (4, 2, 16), (256,)),
    AttentionShape("mixed", (4, 2, 16), (16, 16, 256, 16)),
)


class PagedSequences:
    """The index arrays of a shape: blocks in random order; without a seed one behind the other."""

    def __init__(self, shape: AttentionShape, device: torch.device, seed: int | None) -> None:
        counts = -(-np.array(shape.lengths) // BLOCK_SIZE)
        order = np.arange(int(counts.sum()), dtype=np.int32)
        if seed is not None:
            np.random.default_rng(seed).shuffle(order)
        starts = counts.cumsum() - counts
        self.shape = shape
        self.tables = torch.from_numpy(order).to(device)
        self.table_starts = torch.from_numpy(starts.astype(np.int32)).to(device)
        self.lengths = torch.tensor(shape.lengths, dtype=torch.int32, device=device)
        self.arrays = self.tables, self.table_starts, self.lengths  # as the launchers take them
        self.rows = [order[start : start + count].tolist() for start, count in zip(starts, counts, strict=True)]

    def attend(self, q: Any, keys: Any, values: Any) -> torch.Tensor:
        """The op, over each sequence's gathered blocks."""
        paged = (keys, values, self.tables, self.table_starts.tolist(), list(self.shape.lengths))
        counts = [1] * self.shape.num_sequences
        return attend_by_sequence(q, *paged, counts, self.shape.scale, None, None, torch.empty_like(q))


def planned_call(
    sequences: PagedSequences, tiling: DecodeTiling, *, is_split: bool = True
) -> tuple[Call, dict[str, Any]]:
    """The planned kernel under this tiling, and what the plan came to; unsplit: one program a sequence and key head.

    Reports call ``least_split`` ``least_chunk``, and the plan's split size ``chunk_tokens``.
    """
    shape, device = sequences.shape, sequences.lengths.device
    grid = tiling.grid(shape.heads[1], device)
    whole = -(-max(shape.lengths) // grid.unit) * grid.unit
    plan = plan_decode(shape.lengths, grid, split_size=None if is_split else whole)
    arrays = {str(n): array for n, array in enumerate(plan.arrays())}
    sent = DevicePlan.of(plan, list(Staging.for_arrays(device, arrays).send(arrays).values()))
    workspace = PlannedWorkspace.of(plan.num_states, shape.num_sequences, *shape.heads, device)

    def call(q: Any, keys: Any, values: Any) -> torch.Tensor:
        about: dict[str, Any] = {"scale": shape.scale, "tiling": tiling, "workspace": workspace}
        return planned_decode(q, keys, values, *sequences.arrays, sent, **about)

    settings = {"least_chunk" if name == "least_split" else name: value for name, value in asdict(tiling).items()}
    return call, settings | {"chunk_tokens": int(plan.split_size[0]), "num_items": int(plan.num_items[0])}


def variant_calls(sequences: PagedSequences, dtype: torch.dtype) -> dict[str, tuple[Call, dict[str, Any]]]:
    """Our kernels: as an engine calls it; with the other way to merge; without splits; phase 6's."""
    shape = sequences.shape
    tiling = decode_tiling(shape.num_sequences, *shape.heads[1:], dtype.itemsize)
    merged = "merge_launch" if tiling.is_arrival else "merge_arrival"
    workspace = DecodeWorkspace.of(shape.num_sequences, *shape.heads, max(shape.lengths), sequences.lengths.device)

    def paged(q: Any, keys: Any, values: Any) -> torch.Tensor:
        return paged_attention(q, keys, values, *sequences.arrays, scale=shape.scale, workspace=workspace)

    return {
        "planned": planned_call(sequences, tiling),
        merged: planned_call(sequences, replace(tiling, is_arrival=not tiling.is_arrival)),
        "unsplit": planned_call(sequences, tiling, is_split=False),
        "paged": (paged, {"num_splits": workspace.num_splits}),
    }
