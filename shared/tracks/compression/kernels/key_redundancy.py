"""How similar each cached key is to its head's other keys: R-KV's redundancy. Introduced in phase 9.2.

The cosines of n keys are n² numbers per head, but only the column sums are needed. Two launches compute the sums for
all layers and heads without storing the cosines. The first finds the newest near-duplicate of each key; the second sums
the columns without those duplicates.

Invariant: the same as in :mod:`shared.tracks.compression.kernels.window_mass`.
"""

import torch
from torch import Tensor

from shared.kernels.launch import launch, tl, triton
from shared.tracks.compression.kernels.window_mass import CachedSequences, head_tokens, load_keys

TILE, NUM_WARPS = 64, 4


@triton.jit
def load_units(
    keys, numbers, index, size, first_number, count, layer, kv_head, num_blocks,
    LAYERS: tl.constexpr, BLOCK_SIZE: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Keys, [TILE, D], and the inverses of their norms."""
    k = load_keys(
        keys, numbers, index, size, first_number, count, layer, kv_head, num_blocks, LAYERS, BLOCK_SIZE, HKV, D
    )
    wide = k.to(tl.float32)
    return k, 1 / tl.maximum(tl.sqrt(tl.sum(wide * wide, 1)), 1e-12)


@triton.jit(do_not_specialize=["width", "longest"])
def newest_duplicate_kernel(
    keys, numbers, ends, newest, threshold, width, longest, num_blocks,
    LAYERS: tl.constexpr, BLOCK_SIZE: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Program (i, j, s) handles tile j of KV head i % Hkv of layer i // Hkv of sequence s; stores -1 for none."""
    head = tl.program_id(0)
    layer, kv_head = head // HKV, head % HKV
    numbers += tl.program_id(2) * width
    first_number, count, size = head_tokens(numbers, ends, head, LAYERS * HKV)
    row = tl.program_id(1) * TILE + tl.arange(0, TILE)
    k, inverse = load_units(
        keys, numbers, row, size, first_number, count, layer, kv_head, num_blocks, LAYERS, BLOCK_SIZE, HKV, D
    )
    found = tl.full([TILE], -1, tl.int32)
    for start in tl.range(0, size, TILE):
        col = start + tl.arange(0, TILE)
        others, of_others = load_units(
            keys, numbers, col, size, first_number, count, layer, kv_head, num_blocks, LAYERS, BLOCK_SIZE, HKV, D
        )
        cosine = tl.dot(k, tl.trans(others), input_precision="ieee") * inverse[:, None] * of_others[None, :]
        is_alike = (cosine > threshold) & (col[None, :] != row[:, None])
        found = tl.maximum(found, tl.max(tl.where(is_alike, col[None, :], -1), 1))
    head += tl.program_id(2) * (LAYERS * HKV)
    tl.store(newest + head.to(tl.int64) * longest + row, found, mask=row < size)


@triton.jit(do_not_specialize=["width", "longest"])
def key_redundancy_kernel(
    keys, numbers, ends, newest, redundancy, width, longest, num_blocks,
    LAYERS: tl.constexpr, BLOCK_SIZE: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Program (i, j, s) adds up the columns of tile j of KV head i % Hkv of layer i // Hkv of sequence s."""
    head = tl.program_id(0)
    layer, kv_head = head // HKV, head % HKV
    numbers += tl.program_id(2) * width
    first_number, count, size = head_tokens(numbers, ends, head, LAYERS * HKV)
    col = tl.program_id(1) * TILE + tl.arange(0, TILE)
    k, inverse = load_units(
        keys, numbers, col, size, first_number, count, layer, kv_head, num_blocks, LAYERS, BLOCK_SIZE, HKV, D
    )
    head += tl.program_id(2) * (LAYERS * HKV)
    total, at = tl.zeros([TILE], tl.float32), head.to(tl.int64) * longest
    for start in tl.range(0, size, TILE):
        row = start + tl.arange(0, TILE)
        others, of_others = load_units(
            keys, numbers, row, size, first_number, count, layer, kv_head, num_blocks, LAYERS, BLOCK_SIZE, HKV, D
        )
        spared = tl.load(newest + at + row, mask=row < size, other=-1)
        cosine = tl.dot(k, tl.trans(others), input_precision="ieee") * inverse[:, None] * of_others[None, :]
        is_counted = (col[:, None] != row[None, :]) & (col[:, None] != spared[None, :])
        total += tl.sum(tl.where(is_counted, cosine, 0.0), 1)  # tokens past the end have cosine 0
    tl.store(redundancy + at + col, tl.where(col < size, total / size, float("-inf")), mask=col < longest)


def key_redundancy(keys: Tensor, sequences: CachedSequences, threshold: float) -> Tensor:
    """The mean cosine of each key with its head's other keys, excluding each row's newest near-duplicate; see
    :class:`shared.tracks.compression.compressors.RKV`.

    Args:
        keys: ``[L, blocks, block_size, Hkv, D]``, contiguous.
        threshold: cosine above which keys are near-duplicates.

    Returns:
        fp32 ``[n, L, Hkv, longest]`` of each head's tokens in time order, -inf after them.
    """
    L, num_blocks, block_size, Hkv, D = keys.shape
    n, longest = len(sequences), sequences.longest
    redundancy = torch.empty(n, L, Hkv, longest, dtype=torch.float32, device=keys.device)
    newest = torch.empty_like(redundancy, dtype=torch.int32)
    options = {"LAYERS": L, "BLOCK_SIZE": block_size, "HKV": Hkv, "D": D, "TILE": TILE, "num_warps": NUM_WARPS}
    options["num_stages"] = 3 if keys.element_size() == 2 else 2
    grid, sizes = (L * Hkv, -(-longest // TILE), n), (sequences.width, longest, num_blocks)
    where = keys, sequences.numbers, sequences.ends, newest
    launch(newest_duplicate_kernel, grid, *where, threshold, *sizes, **options)
    launch(key_redundancy_kernel, grid, *where, redundancy, *sizes, **options)
    return redundancy
