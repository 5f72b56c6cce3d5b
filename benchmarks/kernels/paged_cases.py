"""Decode attention over a paged KV cache at real shapes, by our kernels and by others. Introduced in phase 6.1.

Blocks are in random order. FlashInfer (arXiv 2501.01005) reads blocks as we do; PyTorch's attention is timed with the
blocks gathered first, and over contiguous keys. Invariant: that of :mod:`benchmarks.kernels.case`; block tables, plans
and partial states do not count as bytes that must move.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks.kernels.case import Call, Case, Drawn, Peer
from shared.attention.descriptor import DevicePlan
from shared.attention.plan import plan_decode
from shared.engine.executor.staging import Staging
from shared.errors import ConfigError
from shared.kernels.attention.decode_attention import DecodeWorkspace
from shared.kernels.attention.paged_attention import attend_by_sequence, paged_attention
from shared.kernels.attention.planned_attention import planned_decode
from shared.kernels.attention.planned_tiling import DecodeTiling, decode_tiling
from shared.kernels.attention.planned_workspace import PlannedWorkspace

BLOCK_SIZE = 16
FLASHINFER_WORKSPACE = 256 << 20
FLASHINFER = ("flashinfer", "flashinfer_tensor_cores")
PEERS = (*FLASHINFER, "sdpa_gathered", "sdpa_contiguous", "flex_gathered", "flex_contiguous")


@dataclass(frozen=True)
class AttentionShape:
    """A decode step's attention in one layer."""

    name: str
    heads: tuple[int, int, int]  # of queries, of keys, and the head size
    lengths: tuple[int, ...]

    @property
    def num_sequences(self) -> int:
        return len(self.lengths)

    @property
    def scale(self) -> float:
        return float(self.heads[2] ** -0.5)

    def num_bytes(self, itemsize: int) -> int:
        """The bytes of each visible key and value, the queries and the results."""
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
    """The index arrays of a shape: blocks in random order; without a seed in order."""

    def __init__(self, shape: AttentionShape, device: torch.device, seed: int | None) -> None:
        counts = -(-np.array(shape.lengths) // BLOCK_SIZE)
        order = np.arange(int(counts.sum()), dtype=np.int32)
        if seed is not None:
            np.random.default_rng(seed).shuffle(order)
        starts = counts.cumsum() - counts
        self.shape, self.num_used = (
            shape,
            int(np.count_nonzero(shape.lengths)),
        )  # those of length 0, at the end, are padding
        self.tables = torch.from_numpy(order).to(device)
        self.table_starts = torch.from_numpy(starts.astype(np.int32)).to(device)
        self.lengths = torch.tensor(shape.lengths, dtype=torch.int32, device=device)
        self.arrays = self.tables, self.table_starts, self.lengths  # in the form that the launchers take
        self.rows = [order[start : start + count].tolist() for start, count in zip(starts, counts, strict=True)]

    def attend(self, q: Any, keys: Any, values: Any) -> torch.Tensor:
        """The op, over each sequence's gathered blocks."""
        paged = (keys, values, self.tables, self.table_starts.tolist(), list(self.shape.lengths))
        counts = [1] * self.shape.num_sequences
        return attend_by_sequence(q, *paged, counts, self.shape.scale, None, None, torch.empty_like(q))[: self.num_used]


def planned_call(
    sequences: PagedSequences, tiling: DecodeTiling, *, is_split: bool = True, decode: Call | None = None
) -> tuple[Call, dict[str, Any]]:
    """The planned kernel, or one with the same signature, with this tiling, and its settings; unsplit: one program per
    sequence and key head. The plan has no items for sequences of length 0, which pad a captured batch.
    """
    shape, device = sequences.shape, sequences.lengths.device
    grid = tiling.grid(shape.heads[1], device)
    whole, used = -(-max(shape.lengths) // grid.unit) * grid.unit, sequences.num_used
    options: dict[str, Any] = {"num_rows": shape.num_sequences, "is_captured": used < shape.num_sequences}
    plan = plan_decode(shape.lengths[:used], grid, split_size=None if is_split else whole, **options)
    arrays = {str(n): array for n, array in enumerate(plan.arrays())}
    sent = DevicePlan.of(plan, list(Staging.for_arrays(device, arrays).send(arrays).values()))
    workspace = PlannedWorkspace.of(plan.num_states, shape.num_sequences, *shape.heads, device)

    def call(q: Any, keys: Any, values: Any) -> torch.Tensor:
        options: dict[str, Any] = {"scale": shape.scale, "tiling": tiling, "workspace": workspace}
        result: torch.Tensor = (decode or planned_decode)(q, keys, values, *sequences.arrays, sent, **options)
        return result[:used]

    return call, asdict(tiling) | {"chunk_tokens": int(plan.split_size[0]), "num_items": int(plan.num_items[0])}


def variant_calls(sequences: PagedSequences, dtype: torch.dtype) -> dict[str, tuple[Call, dict[str, Any]]]:
    """Our kernels: as an engine calls them; with the other kind of merge; without splits; and phase 6's."""
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


def paged_case(sequences: PagedSequences, dtype: torch.dtype, ours: Mapping[str, Any] | None = None) -> Case:
    """Our calls, by default ``variant_calls``, and their peers over these sequences."""
    shape, calls = sequences.shape, variant_calls(sequences, dtype) if ours is None else ours
    Hq, Hkv, D = shape.heads
    memory = Drawn((len(sequences.tables), BLOCK_SIZE, Hkv, D))
    return Case(
        kernel="attention",
        size=shape.name,
        shape=f"{Hq} over {Hkv} heads of {D}",
        num_bytes=shape.num_bytes(dtype.itemsize),
        ceiling="read",
        ours={name: call for name, (call, _) in calls.items()},
        op=sequences.attend,
        drawn=(Drawn((shape.num_sequences, Hq, D)), memory, memory),
        dtype=dtype,
        peers=paged_peers(sequences, dtype),
        details={name: {"settings": settings} for name, (_, settings) in calls.items()},
    )


Maker = Callable[[PagedSequences], Call]


def paged_peers(sequences: PagedSequences, dtype: torch.dtype) -> dict[str, Peer]:
    """``PEERS`` over these sequences; making a call raises ConfigError with the reason if it is unavailable."""
    # a pool treated as one contiguous cache
    in_order = PagedSequences(sequences.shape, sequences.lengths.device, None).attend
    found = {name: Peer(partial(_flashinfer, sequences, dtype, name), sequences.attend) for name in FLASHINFER}
    for name, library in (("sdpa", _sdpa), ("flex", _flex)):
        found[f"{name}_gathered"] = Peer(partial(_pytorch, sequences, library, _gathered), sequences.attend)
        found[f"{name}_contiguous"] = Peer(partial(_pytorch, sequences, library, _contiguous), in_order)
    return found


def _flashinfer(sequences: PagedSequences, dtype: torch.dtype, name: str) -> Call:
    try:
        import flashinfer
    except ImportError as error:
        raise ConfigError(f"FlashInfer cannot be imported ({error}).") from error
    shape, device = sequences.shape, sequences.lengths.device
    indptr = torch.tensor(np.cumsum([0, *map(len, sequences.rows)]), dtype=torch.int32, device=device)
    last = torch.tensor([(length - 1) % BLOCK_SIZE + 1 for length in shape.lengths], dtype=torch.int32, device=device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        torch.empty(FLASHINFER_WORKSPACE, dtype=torch.uint8, device=device),
        "NHD",
        use_cuda_graph=True,
        use_tensor_cores=name.endswith("tensor_cores"),
        paged_kv_indptr_buffer=torch.empty_like(indptr),
        paged_kv_indices_buffer=torch.empty_like(sequences.tables),
        paged_kv_last_page_len_buffer=torch.empty_like(last),
    )
    types = {"q_data_type": dtype, "kv_data_type": dtype}
    wrapper.plan(indptr, sequences.tables, last, *shape.heads, BLOCK_SIZE, sm_scale=shape.scale, **types)
    return lambda q, keys, values: wrapper.run(q, (keys, values))


def _pytorch(sequences: PagedSequences, library: Maker, memory: Maker) -> Call:
    """``library``'s attention over ``memory``'s copy of a pool: keys or values ``[B, S, Hkv, D]``."""
    dense, attend = memory(sequences), library(sequences)

    def call(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return attend(q[:, :, None], dense(keys).transpose(1, 2), dense(values).transpose(1, 2))[:, :, 0]

    return call


def _gathered(sequences: PagedSequences) -> Call:
    """Every sequence's blocks, padded to the longest, are first copied into one contiguous tensor."""
    widest, longest = max(map(len, sequences.rows)), max(sequences.shape.lengths)
    padded = torch.tensor([row + [0] * (widest - len(row)) for row in sequences.rows], device=sequences.lengths.device)
    rows = padded.flatten()
    return lambda pool: pool.index_select(0, rows).view(len(padded), -1, *pool.shape[2:])[:, :longest]


def _contiguous(sequences: PagedSequences) -> Call:
    """The pool treated as one contiguous cache: a sequence reads different numbers than its blocks hold, but equally
    many."""
    lengths = sequences.shape.lengths
    if len(set(lengths)) > 1 or lengths[0] % BLOCK_SIZE:
        raise ConfigError("Sequences of different lengths do not lie in one piece without padding.")
    return lambda pool: pool.view(len(lengths), lengths[0], *pool.shape[2:])


def _sdpa(sequences: PagedSequences) -> Call:
    mask = None
    if len(set(sequences.shape.lengths)) > 1:
        place = torch.arange(max(sequences.shape.lengths), device=sequences.lengths.device)
        mask = (place[None, :] < sequences.lengths[:, None])[:, None, None, :]
    return partial(F.scaled_dot_product_attention, attn_mask=mask, scale=sequences.shape.scale, enable_gqa=True)


def _flex(sequences: PagedSequences) -> Call:
    shape, lengths = sequences.shape, sequences.lengths
    if lengths.device.type != "cuda":
        raise ConfigError("FlexAttention is compiled, which is not asked for at demo size.")
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch.compiler.reset()
    compiled: Callable[..., Any] = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    mask = None
    if len(set(shape.lengths)) > 1:

        def is_key(b: Any, h: Any, query: Any, key: Any) -> Any:
            return key < lengths[b]

        mask = create_block_mask(is_key, shape.num_sequences, None, 1, max(shape.lengths), device=lengths.device)
    return partial(compiled, block_mask=mask, scale=shape.scale, enable_gqa=True)
