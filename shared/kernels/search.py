"""The exact top-k and top-p cuts of a row, from the list that holds them. Introduced in phase 3.1.

The third launch of :mod:`shared.kernels.cuts`. A list has tokens in any order; sums of integers do not depend on it.
"""

from shared.kernels.keys import FARTHEST, keys_of, load_kept, load_limits, load_sharpness, mass_of
from shared.kernels.launch import tl, triton


@triton.jit
def load_listed(lists, num_listed, start, peak, temperature, LIST_TILE: tl.constexpr):
    """Some listed logits and their keys."""
    i = start + tl.arange(0, LIST_TILE)
    logit = tl.load(lists + i, mask=i < num_listed, other=float("nan"))
    return logit, keys_of(logit, peak, temperature, FARTHEST)


@triton.jit
def listed_mass(lists, num_listed, high, peak, temperature, sharpness, LIST_TILE: tl.constexpr):
    """The mass of the listed tokens with keys up to ``high``, and the least and the largest of these keys."""
    mass = tl.full([], 0, tl.int64)
    least, largest = tl.full([], FARTHEST, tl.int32), tl.full([], 0, tl.int32)
    for start in range(0, num_listed, LIST_TILE):
        logit, keys = load_listed(lists, num_listed, start, peak, temperature, LIST_TILE)
        mass += tl.sum(tl.where(keys <= high, mass_of(logit, peak, sharpness), 0), 0)
        least = tl.minimum(least, tl.min(keys, 0))
        largest = tl.maximum(largest, tl.max(tl.where(keys <= high, keys, 0), 0))
    return mass, least, largest


@triton.jit
def find_top_k_cut(lists, num_listed, k, peak, temperature, LIST_TILE: tl.constexpr):
    """The smallest key up to which k tokens are listed, ``FARTHEST`` if fewer are listed."""
    low, high = tl.full([], -1, tl.int32), tl.full([], FARTHEST, tl.int32)
    _, held = load_listed(lists, num_listed, 0, peak, temperature, LIST_TILE)
    while high - low > 1:
        middle = low + (high - low) // 2
        count = tl.sum((held <= middle).to(tl.int32), 0)
        for start in range(LIST_TILE, num_listed, LIST_TILE):
            _, keys = load_listed(lists, num_listed, start, peak, temperature, LIST_TILE)
            count += tl.sum((keys <= middle).to(tl.int32), 0)
        is_reached = count >= k
        high = tl.where(is_reached, middle, high)
        low = tl.where(is_reached, low, middle)
    return high


@triton.jit
def find_top_p_cut(
    lists, num_listed, limit, low, high, low_mass, peak, temperature, sharpness, LIST_TILE: tl.constexpr
):
    """The smallest key up to which the mass of the listed tokens and ``low_mass`` reach ``limit``, in (low, high]."""
    logit, held = load_listed(lists, num_listed, 0, peak, temperature, LIST_TILE)
    held_masses = mass_of(logit, peak, sharpness)
    while high - low > 1:
        middle = low + (high - low) // 2
        mass = low_mass + tl.sum(tl.where(held <= middle, held_masses, 0), 0)
        for start in range(LIST_TILE, num_listed, LIST_TILE):
            logit, keys = load_listed(lists, num_listed, start, peak, temperature, LIST_TILE)
            mass += tl.sum(tl.where(keys <= middle, mass_of(logit, peak, sharpness), 0), 0)
        is_reached = mass.to(tl.float64) >= limit
        high = tl.where(is_reached, middle, high)
        low = tl.where(is_reached, low, middle)
    return high


@triton.jit
def search_kernel(
    logits,
    peaks,
    temperatures,
    log_min_p,
    top_k,
    top_p,
    num_listed,
    lists,
    block_masses,
    cuts,
    vocabulary,
    row_stride,
    num_blocks,
    BLOCKS: tl.constexpr,
    LIST_TILE: tl.constexpr,
):
    """Store a row's cuts: the largest key that top-k keeps, and the largest that both keep."""
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + row)
    k, p = load_limits(top_k, top_p, row, vocabulary)
    if (temperature > 0) & ((k < vocabulary) | (p < 1)):
        peak, sharpness = tl.load(peaks + row), load_sharpness(temperatures, row)
        length = tl.load(num_listed + row)
        lists += row * vocabulary
        top_k_cut = tl.full([], FARTHEST, tl.int32)
        if top_k is not None and k < vocabulary:
            # The list surely holds the cut: it begins at the peak, and has at least k tokens.
            top_k_cut = find_top_k_cut(lists, length, k, peak, temperature, LIST_TILE)
        top_p_cut = top_k_cut
        if top_p is not None and p < 1:
            low_mass = tl.full([], 0, tl.int64)
            mass, least, largest = listed_mass(lists, length, top_k_cut, peak, temperature, sharpness, LIST_TILE)
            if k == vocabulary:
                b = tl.arange(0, BLOCKS)
                at = block_masses + 2 * (row * num_blocks + b)
                low_mass = tl.sum(tl.load(at + 1, mask=b < num_blocks, other=0), 0)
                high_mass = low_mass + mass
                mass = tl.sum(tl.load(at, mask=b < num_blocks, other=0), 0)
                limit = p * mass.to(tl.float64)
                if (low_mass.to(tl.float64) >= limit) | (high_mass.to(tl.float64) < limit):
                    for start in range(0, vocabulary, LIST_TILE):
                        ids = start + tl.arange(0, LIST_TILE)
                        logit = load_kept(logits + row * row_stride, ids, vocabulary, peak, temperature, log_min_p, row)
                        tl.store(lists + ids, logit, mask=ids < vocabulary)
                    tl.debug_barrier()  # a thread may load what another has stored
                    length = length * 0 + vocabulary
                    low_mass = tl.full([], 0, tl.int64)
                    least, largest = tl.full([], 0, tl.int32), tl.full([], FARTHEST, tl.int32)
            limit = p * mass.to(tl.float64)
            top_p_cut = find_top_p_cut(
                lists, length, limit, least - 1, largest, low_mass, peak, temperature, sharpness, LIST_TILE
            )
        tl.store(cuts + 2 * row, top_k_cut)
        tl.store(cuts + 2 * row + 1, top_p_cut)
