"""Exact top-k and top-p cutoffs of a row of logits without sorting. Introduced in phase 3.1.

A token's distance from the row's maximum is ``(peak - logit) / temperature``. It is not negative, so its bits, read as
an integer, sort in the same order: its *key*. The top-k cut is the k-th smallest key, the top-p cut the smallest key up
to which the probabilities sum to top-p; tokens with a larger key are removed. Both are found in three launches over all
rows, with one program for each block of a row:

    narrow   twice: count the tokens, and sum the probability, up to each of 32 pivots. Afterwards a cut lies between
             two adjacent pivots; the second time the pivots are closer together
    collect  append the few keys between those pivots to a list; the row's last program to arrive finds the cuts by
             bisection over integers, which ends at the exact key whatever the data

Most blocks of a peaked row lie beyond all pivots of the second narrowing, and hold no key between the bounds: their
programs end after the loads.

This is radix select (Alabi et al., "Fast k-selection algorithms for graphics processing units", 2012) with pivots where
logits are dense instead of digits. FlashInfer's sorting-free sampling (arXiv 2501.01005) uses rejection instead: it
draws, rejects tokens that the cuts would remove, and draws again, which does not work with counter-based noise.

Invariants: as in :mod:`shared.sampling.processors` a token is kept if fewer than k tokens, and less than top-p of the
probability, are strictly more likely, so ties are kept or removed together. A token's weight ``exp(-distance)`` is an
integer in units of 2^-44: integer sums do not depend on the order of atomic additions, so the cuts of a row are the
same in every run and every batch. Tokens that min-p removes have no key, so they are neither counted nor summed.
"""

from shared.kernels.arrival import is_last_arrival
from shared.kernels.launch import tl, triton

MAX_VOCABULARY = 2**18  # the sum of this many weights, each at most 2^44 units, fits in 63 bits

PIVOTS = tl.constexpr(32)
NARROWINGS = tl.constexpr(2)
LADDER = tl.constexpr(8.0)  # half of the first pivots are within this distance
UNITS = tl.constexpr(2.0**44)
FARTHEST = tl.constexpr(0x7F800000)  # the key of an infinite distance
NO_KEY = tl.constexpr(0x7FFFFFFF)  # above every pivot
LARGEST = tl.constexpr(2**63 - 1)

# Sums over the programs of a row, int64: for each narrowing the counts and the masses up to its pivots; then the number
# of keys in the list, and the arrivals of peak, collect and draw.
PER_NARROWING = tl.constexpr(3 * PIVOTS)
LISTED = tl.constexpr(NARROWINGS * PER_NARROWING)
ARRIVALS = tl.constexpr(LISTED + 1)
ROW_SUMS = tl.constexpr(ARRIVALS + 3)


@triton.jit
def load_farthest(log_min_p, row):
    """The largest key that min-p keeps in a row, ``FARTHEST`` without min-p."""
    farthest = tl.full([], FARTHEST, tl.int32)
    if log_min_p is not None:
        farthest = tl.abs(tl.load(log_min_p + row)).to(tl.int32, bitcast=True)
    return farthest


@triton.jit
def load_keys(logits, ids, vocabulary, peak, temperature, farthest):
    """The keys of the tokens ``ids``; ``NO_KEY`` for keys above ``farthest`` and past the vocabulary's end."""
    logit = tl.load(logits + ids, mask=ids < vocabulary, other=0.0).to(tl.float32)
    distance = tl.where(logit == peak, 0.0, tl.div_rn(peak - logit, temperature))
    keys = distance.to(tl.int32, bitcast=True)
    return tl.where((ids < vocabulary) & (keys <= farthest), keys, NO_KEY)


@triton.jit
def weight_of(key):
    return tl.exp(-key.to(tl.float32, bitcast=True))


@triton.jit
def mass_of(key):
    return (weight_of(key) * UNITS).to(tl.int64)


@triton.jit
def load_limits(top_k, top_p, row, vocabulary):
    """The row's k (the vocabulary's size for no limit) and p (1 for no limit)."""
    k = tl.full([], 0, tl.int64) + vocabulary
    p = tl.full([], 1.0, tl.float64)
    if top_k is not None:
        k = tl.minimum(tl.load(top_k + row), k)
    if top_p is not None:
        p = tl.load(top_p + row)
    return k, p


@triton.jit
def bracket_cuts(sums, k, p, vocabulary, ANY_K: tl.constexpr, ANY_P: tl.constexpr, narrowings: tl.constexpr):
    """The bounds of both cuts, from the sums of the first ``narrowings`` narrowings.

    A cut is in (``low``, ``high``], where -1 is below all keys; both are ``FARTHEST`` if the row has no such limit.
    Returns k's low and high, the count and the mass up to low (without a top-k the mass of all tokens); p's low and
    high, and the mass up to low.

    ``ANY_K`` and ``ANY_P`` tell whether the batch has such limits. Unneeded code is excluded at compile time: Triton
    3.6 fails on loops and branches that it can prove dead.
    """
    has_k, has_p = k < vocabulary, p < 1
    k_low = tl.where(has_k, -1, FARTHEST)
    p_low = tl.where(has_p, -1, FARTHEST)
    k_high, p_high = tl.full([], FARTHEST, tl.int32), tl.full([], FARTHEST, tl.int32)
    k_count, p_mass = tl.full([], 0, tl.int64), tl.full([], 0, tl.int64)
    k_mass, k_high_mass, all_mass = tl.full([], 0, tl.int64), tl.full([], LARGEST, tl.int64), tl.full([], 0, tl.int64)
    left_low = all_mass
    j = tl.arange(0, PIVOTS)
    for narrowing in tl.static_range(narrowings):
        counts = tl.load(sums + narrowing * PER_NARROWING + j)
        masses = tl.load(sums + narrowing * PER_NARROWING + PIVOTS + j)
        pivots = tl.load(sums + narrowing * PER_NARROWING + 2 * PIVOTS + j).to(tl.int32)
        all_mass = tl.maximum(all_mass, tl.max(masses, 0))
        left_low, left_high = all_mass, all_mass  # bounds of the mass that top-k keeps
        # Counts and masses grow with the key, so the tightest bound is a maximum or a minimum.
        if ANY_K and has_k:
            below = counts < k
            k_low = tl.maximum(k_low, tl.max(tl.where(below, pivots, -1), 0))
            k_high = tl.minimum(k_high, tl.min(tl.where(below, FARTHEST, pivots), 0))
            k_count = tl.maximum(k_count, tl.max(tl.where(below, counts, 0), 0))
            k_mass = tl.maximum(k_mass, tl.max(tl.where(below, masses, 0), 0))
            k_high_mass = tl.minimum(k_high_mass, tl.min(tl.where(below, LARGEST, masses), 0))
            left_low, left_high = k_mass, k_high_mass
        if ANY_P and has_p:
            below = masses.to(tl.float64) < p * left_low.to(tl.float64)
            reached = masses.to(tl.float64) >= p * left_high.to(tl.float64)
            p_low = tl.maximum(p_low, tl.max(tl.where(below, pivots, -1), 0))
            p_high = tl.minimum(p_high, tl.min(tl.where(reached, pivots, FARTHEST), 0))
            p_mass = tl.maximum(p_mass, tl.max(tl.where(below, masses, 0), 0))
    return k_low, k_high, k_count, left_low, p_low, p_high, p_mass


@triton.jit
def choose_pivots(sums, k, p, vocabulary, ANY_K: tl.constexpr, ANY_P: tl.constexpr, narrowing: tl.constexpr):
    """The pivot keys: first a ladder from the peak to infinity, then evenly spaced between the bounds."""
    j = tl.arange(0, PIVOTS)
    if narrowing == 0:
        # A tensor comes first: Triton 3.7's interpreter makes a constexpr of what begins with one.
        distance = j.to(tl.float32) * LADDER / tl.maximum(-j + (PIVOTS - 1), 1).to(tl.float32)
        return tl.where(j == PIVOTS - 1, FARTHEST, distance.to(tl.int32, bitcast=True))
    else:
        k_low, k_high, _, _, p_low, p_high, _ = bracket_cuts(sums, k, p, vocabulary, ANY_K, ANY_P, narrowing)
        has_k, has_p = k < vocabulary, p < 1
        share = tl.where(has_k & has_p, PIVOTS // 2, PIVOTS)  # pivots for each cut
        of_k = has_k & (j < share)
        low = tl.maximum(tl.where(of_k, k_low, p_low), 0).to(tl.float32, bitcast=True)
        high = tl.where(of_k, k_high, p_high).to(tl.float32, bitcast=True)
        high = tl.minimum(high, 2 * low + 1)
        distance = low + (high - low) * ((j % share + 1).to(tl.float32) / (share + 1).to(tl.float32))
        # If min-p leaves fewer than k tokens, both bounds are infinite and the difference is NaN.
        return tl.where(distance == distance, distance.to(tl.int32, bitcast=True), FARTHEST)


@triton.jit
def narrow_kernel(
    logits,
    peaks,
    temperatures,
    log_min_p,
    top_k,
    top_p,
    sums,
    vocabulary,
    row_stride,
    NARROWING: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    temperature = tl.load(temperatures + row)
    k, p = load_limits(top_k, top_p, row, vocabulary)
    if (temperature > 0) & ((k < vocabulary) | (p < 1)):
        sums += row * ROW_SUMS
        pivots = choose_pivots(sums, k, p, vocabulary, top_k is not None, top_p is not None, NARROWING)
        ids = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        farthest = load_farthest(log_min_p, row)
        keys = load_keys(logits + row * row_stride, ids, vocabulary, tl.load(peaks + row), temperature, farthest)
        at = sums + NARROWING * PER_NARROWING + tl.arange(0, PIVOTS)
        if tl.min(keys, 0) <= tl.max(pivots, 0):  # otherwise the block adds nothing to any sum
            is_within = keys[None, :] <= pivots[:, None]  # [PIVOTS, BLOCK]
            counts = tl.sum(is_within.to(tl.int32), 1)
            masses = tl.sum(tl.where(is_within, mass_of(keys)[None, :], 0), 1)
            tl.atomic_add(at, counts.to(tl.int64), sem="relaxed")
            tl.atomic_add(at + PIVOTS, masses, sem="relaxed")
        if tl.program_id(0) == 0:
            tl.store(at + 2 * PIVOTS, pivots.to(tl.int64))


@triton.jit
def load_listed(lists, num_listed, start, LIST_TILE: tl.constexpr):
    i = start + tl.arange(0, LIST_TILE)
    return tl.load(lists + i, mask=i < num_listed, other=NO_KEY, cache_modifier=".cg")


@triton.jit
def listed_mass(lists, num_listed, low, high, LIST_TILE: tl.constexpr):
    """The mass of the listed keys above ``low`` and up to ``high``."""
    mass = tl.full([], 0, tl.int64)
    for start in range(0, num_listed, LIST_TILE):
        keys = load_listed(lists, num_listed, start, LIST_TILE)
        mass += tl.sum(tl.where((keys > low) & (keys <= high), mass_of(keys), 0))
    return mass


@triton.jit
def find_top_k_cut(lists, num_listed, k, low, high, count, LIST_TILE: tl.constexpr):
    """The smallest key up to which there are k tokens; it is in (low, high], with ``count`` tokens up to low."""
    base = low
    held = load_listed(lists, num_listed, 0, LIST_TILE)
    while high - low > 1:
        middle = low + (high - low) // 2
        total = count + tl.sum(((held > base) & (held <= middle)).to(tl.int64))
        for start in range(LIST_TILE, num_listed, LIST_TILE):
            keys = load_listed(lists, num_listed, start, LIST_TILE)
            total += tl.sum(((keys > base) & (keys <= middle)).to(tl.int64))
        is_reached = total >= k
        high = tl.where(is_reached, middle, high)
        low = tl.where(is_reached, low, middle)
    return high


@triton.jit
def find_top_p_cut(lists, num_listed, limit, low, high, mass, LIST_TILE: tl.constexpr):
    """The smallest key up to which the mass reaches ``limit``; it is in (low, high], with ``mass`` up to low."""
    base = low
    held = load_listed(lists, num_listed, 0, LIST_TILE)
    held_mass = mass_of(held)
    while high - low > 1:
        middle = low + (high - low) // 2
        total = mass + tl.sum(tl.where((held > base) & (held <= middle), held_mass, 0))
        for start in range(LIST_TILE, num_listed, LIST_TILE):
            keys = load_listed(lists, num_listed, start, LIST_TILE)
            total += tl.sum(tl.where((keys > base) & (keys <= middle), mass_of(keys), 0))
        is_reached = total.to(tl.float64) >= limit
        high = tl.where(is_reached, middle, high)
        low = tl.where(is_reached, low, middle)
    return high


@triton.jit
def collect_kernel(
    logits,
    peaks,
    temperatures,
    log_min_p,
    top_k,
    top_p,
    sums,
    lists,
    cuts,
    vocabulary,
    row_stride,
    BLOCK: tl.constexpr,
    LIST_TILE: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    temperature = tl.load(temperatures + row)
    k, p = load_limits(top_k, top_p, row, vocabulary)
    if (temperature > 0) & ((k < vocabulary) | (p < 1)):
        sums += row * ROW_SUMS
        lists += row * vocabulary
        ANY_K: tl.constexpr = top_k is not None
        ANY_P: tl.constexpr = top_p is not None
        k_low, k_high, k_count, mass, p_low, p_high, p_mass = bracket_cuts(
            sums, k, p, vocabulary, ANY_K, ANY_P, NARROWINGS
        )
        ids = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        farthest = load_farthest(log_min_p, row)
        keys = load_keys(logits + row * row_stride, ids, vocabulary, tl.load(peaks + row), temperature, farthest)
        is_open = ((keys > k_low) & (keys <= k_high)) | ((keys > p_low) & (keys <= p_high))
        num_open = tl.sum(is_open.to(tl.int64))
        if num_open > 0:
            places = tl.cumsum(is_open.to(tl.int32), 0)
            first = tl.atomic_add(sums + LISTED, num_open, sem="relaxed")
            tl.store(lists + first + places - 1, keys, mask=is_open)
        if is_last_arrival(sums + ARRIVALS + 1, tl.num_programs(0)):
            num_listed = tl.load(sums + LISTED, cache_modifier=".cg").to(tl.int32)
            top_k_cut = k_high
            if ANY_K:
                top_k_cut = find_top_k_cut(lists, num_listed, k, k_low, k_high, k_count, LIST_TILE)
                mass += listed_mass(lists, num_listed, k_low, top_k_cut, LIST_TILE)
            top_p_cut = top_k_cut
            if ANY_P:
                p_high = tl.minimum(p_high, top_k_cut)
                top_p_cut = find_top_p_cut(lists, num_listed, p * mass.to(tl.float64), p_low, p_high, p_mass, LIST_TILE)
            tl.store(cuts + 2 * row, top_k_cut)
            tl.store(cuts + 2 * row + 1, top_p_cut)
