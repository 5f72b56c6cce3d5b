"""The attention that each cached key receives from the last queries, from which compressors compute scores. Introduced
in phase 9.2.

The attention of w queries to n keys is w · n numbers per head, but compressors need only the sums over the queries. Two
launches compute the sums for all layers and heads without storing the rest: the first finds each query's log-sum-exp,
the second sums the columns. Keys are read in place, whether packed or in the tail. One set of launches handles several
sequences.

Invariant: a sum depends neither on timing nor on other requests, so a recomputed request gets the same compressed
cache.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from shared.kernels.attention.decode_attention import LOG2_E
from shared.kernels.launch import launch, next_power_of_two, tl, triton
from shared.tracks.compression.kernels.condensed_attention import cell_rows

TILE, NUM_WARPS = 128, 4  # keys per tile
NARROW = 128  # bytes of a key; with more stages of wider keys a second program would not fit
STAGES = 5, 3  # of the launches for narrow keys. the first load is a table entry, the next ones keys: two tiles each

TABLE_START = 4  # start of the block table in ``CachedSequences.numbers``
TABLE = tl.constexpr(TABLE_START)


@dataclass(frozen=True)
class CachedSequences:
    """The cached tokens of n sequences, for kernels that process all of their layers and heads.

    ``numbers``: int32 ``[n, width]``, on the device. For each sequence: its row in the pool, its token count, the
    tokens of its tail, the slots of its packed part and, from ``TABLE_START`` on, its block table. ``ends``: as in
    ``KeptTokens``. ``longest``: the maximum number of tokens of any head.
    """

    numbers: Tensor
    ends: Tensor
    longest: int

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def width(self) -> int:
        """The numbers of one sequence."""
        return self.numbers.shape[1]


@triton.jit
def head_tokens(numbers, ends, head, HEADS: tl.constexpr):
    """For a head: the index of its first packed token, the number of its packed tokens, and the number of all its
    tokens."""
    ends += tl.load(numbers).to(tl.int64) * (HEADS + 2) + head
    first_number = tl.load(ends)
    count = tl.load(ends + 1) - first_number
    return first_number, count, count + tl.load(numbers + 2)


@triton.jit
def window_rows(numbers, layer, r, w, RING_ROWS, LENGTH: tl.constexpr, HQ: tl.constexpr, D: tl.constexpr):
    """Offsets in the ring, int64, of the queries ``r`` among a layer's last w, for head 0."""
    row, num_tokens = tl.load(numbers), tl.load(numbers + 1)
    return ((layer * RING_ROWS + row).to(tl.int64) * LENGTH + (num_tokens - w + r) % LENGTH) * (HQ * D)


@triton.jit
def load_keys(
    keys, numbers, index, size, first_number, count, layer, kv_head, num_blocks,
    LAYERS: tl.constexpr, BLOCK_SIZE: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Keys ``index`` of a head, [TILE, D]."""
    packed_slots = tl.load(numbers + 3)
    at = cell_rows(
        index, size, numbers + TABLE, count, first_number, packed_slots, layer, kv_head, num_blocks, LAYERS,
        BLOCK_SIZE, HKV, D,
    )  # fmt: skip
    return tl.load(keys + at[:, None] + tl.arange(0, D)[None, :], mask=(index < size)[:, None], other=0.0)


@triton.jit(do_not_specialize=["w", "width"])
def window_sums_kernel(
    ring, keys, numbers, ends, sums, scale, w, width, num_blocks, RING_ROWS,
    LENGTH: tl.constexpr, LAYERS: tl.constexpr, BLOCK_SIZE: tl.constexpr, HKV: tl.constexpr, GROUP: tl.constexpr,
    D: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Program (i, s) handles query head i % Hq of layer i // Hq of sequence s; it stores the negated base-2 logarithms
    of the softmax sums of its queries."""
    HQ: tl.constexpr = HKV * GROUP
    program = tl.program_id(0)
    layer, head = program // HQ, program % HQ
    numbers += tl.program_id(1) * width
    kv_head = head // GROUP
    first_number, count, size = head_tokens(numbers, ends, layer * HKV + kv_head, LAYERS * HKV)
    r, d = tl.arange(0, ROWS), tl.arange(0, D)
    rows = window_rows(numbers, layer, r, w, RING_ROWS, LENGTH, HQ, D)
    q = tl.load(ring + rows[:, None] + (head * D + d)[None, :], mask=r[:, None] < w, other=0.0)
    maximum, total = tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32)
    for tile in tl.range(0, size, TILE):
        index = tile + tl.arange(0, TILE)
        k = load_keys(
            keys, numbers, index, size, first_number, count, layer, kv_head, num_blocks, LAYERS, BLOCK_SIZE, HKV, D
        )
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if tile + TILE > size - w:  # every query sees the earlier tiles
            scores = tl.where(index[None, :] <= (size - w + r)[:, None], scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, 1) * scale)  # valid because the scale is positive
        weights = tl.exp2(scores * scale - new_maximum[:, None])  # finite, since every query sees the first key
        total = total * tl.exp2(maximum - new_maximum) + tl.sum(weights, 1)
        maximum = new_maximum
    program += tl.program_id(1) * (LAYERS * HQ)
    logarithm = tl.where(r < w, maximum + tl.log2(total), float("inf"))  # padding has no weight
    tl.store(sums + program * ROWS + r, -logarithm)


@triton.jit(do_not_specialize=["w", "width", "longest"])
def window_mass_kernel(
    ring, keys, numbers, ends, sums, mass, scale, w, width, longest, num_blocks, RING_ROWS,
    LENGTH: tl.constexpr, LAYERS: tl.constexpr, BLOCK_SIZE: tl.constexpr, HKV: tl.constexpr, GROUP: tl.constexpr,
    D: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Program (i, j, s) adds up the columns of tile j for the query heads of KV head i % Hkv of layer i // Hkv of
    sequence s. Keys are loaded once for all of these heads."""
    HQ: tl.constexpr = HKV * GROUP
    program = tl.program_id(0)
    layer, kv_head = program // HKV, program % HKV
    numbers += tl.program_id(2) * width
    first_number, count, size = head_tokens(numbers, ends, program, LAYERS * HKV)
    head = (tl.program_id(2) * (LAYERS * HKV) + program) * GROUP  # the first head of the group, for all sequences
    r, d = tl.arange(0, ROWS), tl.arange(0, D)
    tile = tl.program_id(1) * TILE
    index = tile + tl.arange(0, TILE)
    mass += head.to(tl.int64) * longest + index
    if tile < size:
        rows = window_rows(numbers, layer, r, w, RING_ROWS, LENGTH, HQ, D)
        queries = ring + rows[:, None] + (kv_head * (GROUP * D) + d)[None, :]
        k = load_keys(
            keys, numbers, index, size, first_number, count, layer, kv_head, num_blocks, LAYERS, BLOCK_SIZE, HKV, D
        )
        for g in tl.range(GROUP):
            q = tl.load(queries + g * D, mask=r[:, None] < w, other=0.0)
            of_query = tl.load(sums + (head + g) * ROWS + r)
            scores = tl.dot(k, tl.trans(q), input_precision="ieee") * scale + of_query[None, :]  # [TILE, ROWS]
            if tile + TILE > size - w:
                end = count + tl.load(numbers + 2)  # loaded again; otherwise the mask would occupy registers
                scores = tl.where(index[:, None] <= (end - w + r)[None, :], scores, float("-inf"))
            tl.store(mass + g * longest, tl.sum(tl.exp2(scores), 1), mask=index < longest)
    else:
        for g in tl.range(GROUP):
            tl.store(mass + g * longest, tl.zeros([TILE], tl.float32), mask=index < longest)


def window_mass(ring: Tensor, keys: Tensor, sequences: CachedSequences, w: int, scale: float) -> Tensor:
    """The attention of the last w queries, summed; see ``shared.tracks.compression.compressors.window_attention``.

    Args:
        ring: ``[L, rows, length, Hq, D]``: the query of token t is at ``t % length`` of the sequence's row; contiguous.
        keys: ``[L, blocks, block_size, Hkv, D]``, contiguous.
        w: the number of queries, at most the number of tokens of any head.

    Returns:
        fp32 ``[n, L, Hkv, Hq / Hkv, longest]`` of each head's tokens in time order, 0 after them.
    """
    L, ring_rows, length, Hq, D = ring.shape
    _, num_blocks, block_size, Hkv, _ = keys.shape
    n, longest = len(sequences), sequences.longest
    rows = max(16, next_power_of_two(length))
    sums = torch.empty(n, L * Hq, rows, dtype=torch.float32, device=ring.device)
    mass = torch.empty(n, L, Hkv, Hq // Hkv, longest, dtype=torch.float32, device=ring.device)
    options = {"LENGTH": length, "LAYERS": L, "BLOCK_SIZE": block_size, "HKV": Hkv, "GROUP": Hq // Hkv, "D": D}
    options |= {"ROWS": rows, "TILE": TILE, "num_warps": NUM_WARPS}
    where, window = (ring, keys, sequences.numbers, sequences.ends, sums), (scale * LOG2_E, w, sequences.width)
    stages = STAGES if D * keys.element_size() <= NARROW else (3 if keys.element_size() == 2 else 2, 2)
    launch(window_sums_kernel, (L * Hq, n), *where, *window, num_blocks, ring_rows, **options, num_stages=stages[0])
    grid, sizes = (L * Hkv, -(-longest // TILE), n), (longest, num_blocks, ring_rows)
    launch(window_mass_kernel, grid, *where, mass, *window, *sizes, **options, num_stages=stages[1])
    return mass
