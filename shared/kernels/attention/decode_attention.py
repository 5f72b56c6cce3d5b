"""Decode attention over a contiguous KV cache: ``flash``. Introduced in phase 3.1.

One query per head reads every cached key and value once, so decode attention is memory-bound. Three ideas:

- *Online softmax* (Milakov & Gimelshein, arXiv 1805.02867; Dao et al., arXiv 2205.14135): keys are processed in tiles,
  with a running maximum and sum in fp32, so scores are never stored.
- *Grouped queries*: the query heads that share a KV head are the rows of one small product, so a key is loaded once
  for all of them. The tensor cores take 16 rows; the rest is zero padding.
- *Split-KV* (Flash-Decoding, Dao et al. 2023; FlashInfer, arXiv 2501.01005): one sequence has too few KV heads to
  occupy a GPU, so its keys are divided into splits, one per program, whose states (maximum, sum, weighted values) are
  then merged.

The grid depends on capacities alone; the split size is computed at run time from the length. It is at least a tile, so
a short sequence uses few of the ``num_splits`` programs of a KV head; the others return immediately. The last program
of a head to arrive, according to a counter on the device, merges the states: a second kernel would cost another launch
in every layer for every token.

Invariants: only a sequence's visible keys are read, so other slots may hold anything; states are merged in the order of
the keys, whichever program merges them, so a result does not depend on timing; a sequence of length 0 gives zeros; the
counters are zero between launches.
"""

import math
from dataclasses import dataclass
from typing import Self

import torch

from shared.kernels.arrival import is_last_arrival
from shared.kernels.launch import launch, launches, next_power_of_two, num_multiprocessors, tl, triton
from shared.ops.attention import sdpa_attention

NO_WINDOW = 2**30
LOG2_E = math.log2(math.e)


@dataclass(frozen=True)
class Tiling:
    """The tiling for one head size: keys per tile, maximum splits of a KV head, warps and pipeline stages."""

    tile: int
    max_splits: int
    num_warps: int = 4
    num_stages: int = 3  # fewer if the tiles of keys and values exceed PIPELINE_BYTES
    merge_numbers: int = 4096  # fp32 numbers that the merging program holds at a time


TILINGS = {
    16: Tiling(tile=64, max_splits=64),
    32: Tiling(tile=64, max_splits=64),
    64: Tiling(tile=64, max_splits=64),
    128: Tiling(tile=64, max_splits=64),
    256: Tiling(tile=64, max_splits=64, num_stages=1, merge_numbers=8192),
}
PROGRAMS_PER_MULTIPROCESSOR = 1
PIPELINE_BYTES = 96 * 1024  # bytes of loads in flight per program, for the smallest GPUs too


@triton.jit
def decode_attention_kernel(
    q, keys, values, regions, lengths, out, partial, partial_max, partial_sum, counters, scale, softcap, window,
    q_row_stride, q_head_stride, region_stride, head_stride,
    HKV: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    MERGED: tl.constexpr, MERGED_ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)  # one for each sequence and KV head
    sequence, kv_head = row // HKV, row % HKV
    length = tl.load(lengths + sequence)
    first, split_size, num_used = keys_of_split(length, window, TILE)
    g, d = tl.arange(0, ROWS), tl.arange(0, D)
    is_head = g < GROUP
    out += row.to(tl.int64) * (GROUP * D)  # the heads of a group are adjacent
    if tl.program_id(1) < num_used:
        queries = load_queries(q, sequence, kv_head, q_row_stride, q_head_stride, g, d, is_head, GROUP)
        memory = tl.load(regions + sequence).to(tl.int64) * region_stride + kv_head.to(tl.int64) * head_stride
        start = first + tl.program_id(1) * split_size
        end = tl.minimum(start + split_size, length)
        maximum = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        weighted = tl.zeros([ROWS, D], tl.float32)
        for tile in tl.range(start, end, TILE):
            index = tile + tl.arange(0, TILE)
            is_key = index < end
            tokens = memory + index.to(tl.int64)[:, None] * D + d[None, :]
            k = tl.load(keys + tokens, mask=is_key[:, None], other=0.0)  # [TILE, D]
            v = tl.load(values + tokens, mask=is_key[:, None], other=0.0)
            scores = tl.dot(queries, tl.trans(k), input_precision="ieee") * scale  # [ROWS, TILE], in base 2
            # cap · tanh(x), with exp(2x) = 2^scores because of how the launcher chose the scale
            if softcap is not None:
                scores = softcap * (1.0 - 2.0 / (tl.exp2(scores) + 1.0))
            scores = tl.where(is_key[None, :], scores, float("-inf"))
            # exercise 03.1x5: update the running maximum, sum and weighted values with a tile
            # hint: new_maximum covers the previous tiles and this one; scores are [ROWS, TILE], in base 2
            # hint: sums relative to the old maximum are rescaled by exp2(old - new)
            # hint: a product of tiles is tl.dot, here with input_precision="ieee" and weights in the dtype of v
            new_maximum = tl.maximum(maximum, tl.max(scores, 1))
            weights = tl.exp2(scores - new_maximum[:, None])
            kept = tl.exp2(maximum - new_maximum)
            total = total * kept + tl.sum(weights, 1)
            weighted = weighted * kept[:, None]
            weighted += tl.dot(weights.to(v.dtype), v, input_precision="ieee")
            maximum = new_maximum
            # end exercise

        states = (partial, partial_max, partial_sum, counters)
        store_split(out, states, maximum, total, weighted, num_used, g, d, is_head, GROUP, D, MERGED_ROWS, MERGED)
    elif tl.program_id(1) == 0:  # no visible key
        tl.store(out + g[:, None] * D + d[None, :], tl.zeros([ROWS, D], tl.float32), mask=is_head[:, None])


@triton.jit
def keys_of_split(length, window, TILE: tl.constexpr):
    """The first visible key, the keys per split, and the number of nonempty splits.

    The second axis of the grid has one program per split; the window's keys are divided among them in whole tiles.
    """
    first = tl.maximum(length - window, 0)  # of the visible keys
    split_size = tl.cdiv(tl.cdiv(length - first, TILE), tl.num_programs(1)) * TILE
    return first, split_size, tl.cdiv(length - first, tl.maximum(split_size, 1))


@triton.jit
def load_queries(q, sequence, kv_head, row_stride, head_stride, g, d, is_head, GROUP: tl.constexpr):
    """The query heads of a KV head, ``[ROWS, D]``, zeros from row GROUP on."""
    heads = sequence.to(tl.int64) * row_stride + (kv_head * GROUP + g)[:, None] * head_stride
    return tl.load(q + heads + d[None, :], mask=is_head[:, None], other=0.0)


@triton.jit
def store_split(
    out, states, maximum, total, weighted, num_used, g, d, is_head,
    GROUP: tl.constexpr, D: tl.constexpr, MERGED_ROWS: tl.constexpr, MERGED: tl.constexpr,
):  # fmt: skip
    """Store a KV head's result if one program read all of its keys, otherwise a state; the last of several programs
    merges the states."""
    if num_used == 1:
        tl.store(out + g[:, None] * D + d[None, :], weighted / total[:, None], mask=is_head[:, None])
    else:
        partial, partial_max, partial_sum, counters = states
        row, num_splits = tl.program_id(0), tl.num_programs(1)
        first_state = row.to(tl.int64) * num_splits
        state = (first_state + tl.program_id(1)) * GROUP + g
        tl.store(partial + state[:, None] * D + d[None, :], weighted, mask=is_head[:, None])
        tl.store(partial_max + state, maximum, mask=is_head)
        tl.store(partial_sum + state, total, mask=is_head)
        if is_last_arrival(counters + row, num_used):
            merge(partial, partial_max, partial_sum, out, first_state, num_used, GROUP, D, MERGED_ROWS, MERGED)


@triton.jit
def merge(
    partial, partial_max, partial_sum, out, states, num_used,
    GROUP: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, MERGED: tl.constexpr,
):  # fmt: skip
    """Merge the states of one KV head, MERGED at a time, in order, and store the result."""
    g, d = tl.arange(0, ROWS), tl.arange(0, D)
    is_head = g < GROUP
    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    weighted = tl.zeros([ROWS, D], tl.float32)
    for split in tl.range(0, num_used, MERGED):
        split += tl.arange(0, MERGED)
        state = (states + split)[:, None] * GROUP + g[None, :]  # [MERGED, ROWS]
        is_state = (split < num_used)[:, None] & is_head[None, :]
        maxima = tl.load(partial_max + state, mask=is_state, other=float("-inf"), cache_modifier=".cg")
        sums = tl.load(partial_sum + state, mask=is_state, other=0.0, cache_modifier=".cg")
        parts = tl.load(
            partial + state[:, :, None] * D + d[None, None, :],
            mask=is_state[:, :, None],
            other=0.0,
            cache_modifier=".cg",
        )  # [MERGED, ROWS, D]
        new_maximum = tl.maximum(maximum, tl.max(maxima, 0))
        # Padding rows have no state: -inf - -inf is NaN there, and their result is not stored.
        weights = tl.exp2(maxima - new_maximum[None, :])
        kept = tl.exp2(maximum - new_maximum)
        total = total * kept + tl.sum(weights * sums, 0)
        weighted = weighted * kept[:, None] + tl.sum(weights[:, :, None] * parts, 0)
        maximum = new_maximum
    tl.store(out + g[:, None] * D + d[None, :], weighted / total[:, None], mask=is_head[:, None])


@dataclass(frozen=True)
class DecodeWorkspace:
    """Workspace of :func:`decode_attention`, allocated once and shared by all layers on one stream."""

    num_splits: int
    partial: torch.Tensor  # fp32 [B, Hkv, splits, G, D]: values weighted relative to the state's maximum
    partial_max: torch.Tensor  # fp32 [B, Hkv, splits, G], of scores in base 2
    partial_sum: torch.Tensor  # fp32 [B, Hkv, splits, G]
    counters: torch.Tensor  # int32 [B, Hkv], zero between launches

    @property
    def states(self) -> tuple[torch.Tensor, ...]:
        """The buffers, as the kernels take them."""
        return self.partial, self.partial_max, self.partial_sum, self.counters

    def check(self, num_sequences: int) -> None:
        """Raise ValueError if a launch has more sequences than the workspace serves."""
        if len(self.counters) < num_sequences:
            raise ValueError(f"the workspace serves {len(self.counters)} sequences, not {num_sequences}")

    @classmethod
    def of(
        cls, num_sequences: int, num_heads: int, num_kv_heads: int, head_dim: int, capacity: int, device: torch.device
    ) -> Self:
        """A workspace for up to ``num_sequences`` sequences of up to ``capacity`` tokens each."""
        splits = choose_splits(num_sequences * num_kv_heads, capacity, head_dim, num_multiprocessors(device))
        states = (num_sequences, num_kv_heads, splits, num_heads // num_kv_heads)
        return cls(
            splits,
            torch.empty(*states, head_dim, dtype=torch.float32, device=device),
            torch.empty(states, dtype=torch.float32, device=device),
            torch.empty(states, dtype=torch.float32, device=device),
            torch.zeros(states[:2], dtype=torch.int32, device=device),
        )


def choose_splits(num_rows: int, capacity: int, head_dim: int, multiprocessors: int) -> int:
    """The number of programs for each of ``num_rows`` (sequence, KV head) pairs.

    Enough to occupy every multiprocessor, but at most one per tile of the longest sequence, and few enough that one
    program can merge their states quickly.
    """
    tiling = TILINGS[head_dim]
    wanted = -(-PROGRAMS_PER_MULTIPROCESSOR * multiprocessors // num_rows)
    return max(1, min(wanted, -(-capacity // tiling.tile), tiling.max_splits))


def decode_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    regions: torch.Tensor,
    lengths: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    workspace: DecodeWorkspace,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """:func:`shared.ops.attention.naive_attention` of one new token for each of B sequences.

    Args:
        q: ``[B, Hq, D]``; heads may be strided, the elements of a head are contiguous.
        keys, values: ``[regions, Hkv, capacity, D]``, a layer's KV cache; the rows of a head are contiguous.
        regions: integer ``[B]``, the region of each sequence.
        lengths: int32 ``[B]``, the tokens of each sequence, the new one last; read on the device, so a captured launch
            can be replayed with other lengths.
        window: attend only to the last ``window`` tokens, the token itself included.
        softcap: scores become ``c · tanh(scores / c)``.
        workspace: must serve at least B sequences.
        out: output buffer, ``[B, Hq, D]`` contiguous; None: allocated.

    Returns:
        ``[B, Hq, D]`` in the dtype of q.
    """
    B, Hq, D = q.shape
    Hkv = keys.shape[1]
    if out is None:
        out = torch.empty(B, Hq, D, dtype=q.dtype, device=q.device)
    if not launches(q):
        for b, (region, length) in enumerate(zip(regions.tolist(), lengths.tolist(), strict=True)):
            seen = slice(0 if window is None else max(0, length - window), length)
            k, v = keys[region, :, seen], values[region, :, seen]
            out[b] = sdpa_attention(q[b : b + 1], k, v, scale=scale, softcap=softcap)[0] if length else 0.0
        return out
    if B == 0:
        return out
    workspace.check(B)
    launch(
        decode_attention_kernel,
        (B * Hkv, workspace.num_splits),
        *(q, keys, values, regions, lengths, out),
        *workspace.states,
        *in_base_2(scale, softcap),
        NO_WINDOW if window is None else window,
        *(q.stride(0), q.stride(1), keys.stride(0), keys.stride(1)),
        **split_options(TILINGS[D], Hq, Hkv, D, keys.element_size()),
    )
    return out


def in_base_2(scale: float, softcap: float | None) -> tuple[float, float | None]:
    """The scale and softcap of a kernel, whose exponentials are powers of two."""
    if softcap is None:
        return scale * LOG2_E, None
    return 2 * LOG2_E * scale / softcap, softcap * LOG2_E


def split_options(tiling: Tiling, num_heads: int, num_kv_heads: int, head_dim: int, itemsize: int) -> dict[str, int]:
    """The launch options for programs that share the keys of a KV head; keys have ``itemsize`` bytes per element."""
    group = num_heads // num_kv_heads
    rows = next_power_of_two(group)
    stages = PIPELINE_BYTES // (2 * tiling.tile * head_dim * itemsize)
    return {
        "HKV": num_kv_heads,
        "GROUP": group,
        "D": head_dim,
        "ROWS": max(16, rows),
        "TILE": tiling.tile,
        "MERGED": max(1, tiling.merge_numbers // (rows * head_dim)),
        "MERGED_ROWS": rows,
        "num_warps": tiling.num_warps,
        "num_stages": min(tiling.num_stages, max(1, stages)),
    }
