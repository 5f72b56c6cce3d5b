"""Selects the keys that each head keeps, for all layers of several sequences in one launch. Introduced in phase 9.2.

:func:`shared.tracks.compression.selection.select` sorts. Here a program serves one head and finds the same thresholds
by bisection. Reinterpreted as integers, floats keep their order (negative ones after all bits but the sign are
inverted), so 32 passes over a row find the threshold at which the values above reach a given sum or count. Rows stay in
the multiprocessor's cache between passes. A running count resolves ties in favour of older keys.

Invariant: each head keeps the keys that ``select`` keeps; sums are in fp64 and in a fixed order.
"""

import torch
from torch import Tensor

from shared.kernels.launch import launch, tl, triton
from shared.tracks.compression.kernels.window_mass import CachedSequences, head_tokens
from shared.tracks.compression.selection import Budget

TILE, NUM_WARPS = 4096, 8

LOWEST, HIGHEST = tl.constexpr(-(2**31)), tl.constexpr(0x7F800001)  # lower and higher than any float's integer


@triton.jit
def load_order(values, start, size, first, last, TILE: tl.constexpr):
    """Values of a row as integers in the same order; ``LOWEST`` before index ``first`` and from ``last`` on."""
    index = start + tl.arange(0, TILE)
    value = tl.load(values + index, mask=index < size, other=0.0) + 0.0  # -0 becomes 0
    bits = value.to(tl.int32, bitcast=True)
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where((index >= first) & (index < last), order, LOWEST), index


@triton.jit
def middle_of(low, high):
    return ((low.to(tl.int64) + high.to(tl.int64)) >> 1).to(tl.int32)


@triton.jit
def find_mass_cut(values, size, limit, TILE: tl.constexpr):
    """The largest threshold of nonnegative values such that the values at or above it sum to at least ``limit``."""
    low, high = tl.full([], 0, tl.int32), tl.full([], HIGHEST, tl.int32)
    while high - low > 1:
        middle = middle_of(low, high)
        mass = tl.full([], 0, tl.float64)
        for start in range(0, size, TILE):
            bits, _ = load_order(values, start, size, 0, size, TILE)
            mass += tl.sum(tl.where(bits >= middle, bits.to(tl.float32, bitcast=True), 0.0).to(tl.float64), 0)
        is_reached = mass >= limit
        low = tl.where(is_reached, middle, low)
        high = tl.where(is_reached, high, middle)
    return low


@triton.jit
def find_count_cut(values, size, first, last, wanted, TILE: tl.constexpr):
    """The threshold that at most ``wanted`` values exceed, and how many values equal to it complete the count."""
    low, high = tl.full([], LOWEST, tl.int32), tl.full([], HIGHEST, tl.int32)
    above = tl.full([], 0, tl.int32)
    while high > low + 1:
        middle = middle_of(low, high)
        count = tl.full([], 0, tl.int32)
        for start in range(0, size, TILE):
            bits, _ = load_order(values, start, size, first, last, TILE)
            count += tl.sum((bits >= middle).to(tl.int32), 0)
        is_reached = count > wanted
        above = tl.where(is_reached, above, count)  # from `high` on
        low = tl.where(is_reached, middle, low)
        high = tl.where(is_reached, high, middle)
        low = tl.where(count == wanted, high - 1, low)  # exactly the keys from `high` on
    return low, wanted - above


@triton.jit
def num_needed(attention, size, p, TILE: tl.constexpr):
    """The size of the smallest set of keys whose mass is ``p``; see ``selection.top_p_count``."""
    cut = find_mass_cut(attention, size, p, TILE)
    mass, above = tl.full([], 0, tl.float64), tl.full([], 0, tl.int32)
    for start in range(0, size, TILE):
        bits, _ = load_order(attention, start, size, 0, size, TILE)
        mass += tl.sum(tl.where(bits > cut, bits.to(tl.float32, bitcast=True), 0.0).to(tl.float64), 0)
        above += tl.sum((bits > cut).to(tl.int32), 0)
    weight = tl.maximum(cut.to(tl.float32, bitcast=True), 1e-37).to(tl.float64)
    more = tl.minimum((p - mass) / weight, 1e9)
    whole = more.to(tl.int32)
    return tl.minimum(above + tl.maximum(whole + (whole.to(tl.float64) < more).to(tl.int32), 1), size)


@triton.jit(do_not_specialize=["width", "longest"])
def key_selection_kernel(
    scores, attention, numbers, ends, windows, chosen, counts, p, width, longest, least, most, num_sinks, num_recent,
    HEADS: tl.constexpr, HKV: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Program (i, s) handles KV head i % Hkv of layer i // Hkv of sequence s."""
    head = tl.program_id(0)
    _, _, size = head_tokens(numbers + tl.program_id(1) * width, ends, head, HEADS)
    of_all = tl.program_id(1) * HEADS + head
    row = of_all.to(tl.int64) * longest
    scores, attention, chosen = scores + row, attention + row, chosen + row
    window = tl.load(windows + head // HKV)
    first = tl.minimum(num_sinks, size)  # of the keys that may be dropped
    last = tl.maximum(size - num_recent, first)
    cut, ties = tl.full([], HIGHEST, tl.int32), tl.full([], 0, tl.int32)
    if window > 0:
        first, last = first * 0, tl.maximum(size - window, 0)
    elif last > first:
        cut, ties = find_count_cut(scores, size, 0, size, num_needed(attention, size, tl.load(p), TILE), TILE)
        count, seen = size - last + first, tl.full([], 0, tl.int32)
        for start in range(0, size, TILE):  # the best keys, and those that are always kept
            bits, index = load_order(scores, start, size, 0, size, TILE)
            is_tie = (bits == cut).to(tl.int32)
            is_best = (bits > cut) | ((bits == cut) & (seen + tl.cumsum(is_tie, 0) <= ties))
            count += tl.sum((is_best & (index >= first) & (index < last)).to(tl.int32), 0)
            seen += tl.sum(is_tie, 0)
        more = tl.minimum(tl.minimum(tl.maximum(count, least), most), size) - (size - last + first)
        cut, ties = tl.full([], HIGHEST, tl.int32), tl.full([], 0, tl.int32)
        if more > 0:
            cut, ties = find_count_cut(scores, size, first, last, more, TILE)
    seen, num_kept = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    for start in range(0, size, TILE):
        bits, index = load_order(scores, start, size, first, last, TILE)
        is_tie = (bits == cut).to(tl.int32)
        is_best = (bits > cut) | ((bits == cut) & (seen + tl.cumsum(is_tie, 0) <= ties))
        is_kept = (is_best | (index < first) | (index >= last)) & (index < size)
        number = num_kept + tl.cumsum(is_kept.to(tl.int32), 0) - 1
        tl.store(chosen + number, index, mask=is_kept)
        seen += tl.sum(is_tie, 0)
        num_kept += tl.sum(is_kept.to(tl.int32), 0)
    tl.store(counts + of_all, num_kept)


def select_keys(
    scores: Tensor,
    attention: Tensor,
    sequences: CachedSequences,
    windows: Tensor,
    budget: Budget,
    p: Tensor,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """The keys that each head keeps.

    Args:
        scores: fp32 ``[n, L, Hkv, longest]``, finite, of each head's keys in time order; contiguous.
        attention: the same, nonnegative, with sum 1.
        windows: int32 ``[L]``, the window of each layer, exactly which is kept; 0: no window.
        p: fp64 ``[1]``, the budget's p, on the device.
        out: the buffers of the result; None: new tensors.

    Returns:
        int32 ``[n, L, Hkv, longest]``, the indices of the kept keys in time order, and int32 ``[n, L, Hkv]``, their
        number.
    """
    n, L, Hkv, longest = scores.shape
    chosen, counts = out or (torch.empty_like(scores, dtype=torch.int32), windows.new_empty(n, L, Hkv))
    bounds = sequences.width, longest, budget.least, budget.most, budget.num_sinks, budget.num_recent
    where = sequences.numbers, sequences.ends, windows
    options = {"HEADS": L * Hkv, "HKV": Hkv, "TILE": TILE, "num_warps": NUM_WARPS, "num_stages": 1}
    launch(key_selection_kernel, (L * Hkv, n), scores, attention, *where, chosen, counts, p, *bounds, **options)
    return chosen, counts
