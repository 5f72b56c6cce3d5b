"""Exact top-k and top-p cutoffs of a row of logits without sorting. Introduced in phase 3.1.

A token's distance from the row's maximum is ``(peak - logit) / temperature``. It is not negative, so its bits, read as
an integer, sort in the same order: its *key*. The top-k cut is the k-th smallest key, the top-p cut the smallest key up
to which the probabilities sum to top-p; tokens with a larger key are removed. Three launches find both:

    bracket  one program per row estimates, from a sample of the row, two keys between which the cuts lie
    collect  one program per block counts the tokens and sums the probability up to the lower key, and appends the keys
             between the two to a list: some thousands of the 128,000
    search   one program per row tests whether the cuts are in the list, and finds them by bisection over integers,
             which ends at the exact key whatever the data. If they are not, it lists the whole row first, which is slow
             and practically never happens

So every logit is compared with two keys instead of many pivots, and no result depends on the estimate. This is the
selection of Floyd and Rivest ("Expected time bounds for selection", 1975), for sums of probability too. FlashInfer's
sorting-free sampling (arXiv 2501.01005) uses rejection instead: it draws, rejects tokens that the cuts would remove,
and draws again, which does not work with counter-based noise.

The estimate. Each group of ``GROUP`` logits gives its maximum, found by the peak launch, and its first logit. There are
at least k tokens up to the k-th of the maxima. Top-p is about the *tail*, the probability beyond a key: the sample
gives the tail, and the peak launch the sum of all. A token in the tail weighs at most what the key itself weighs, so no
heavy token that the sample misses can spoil the estimate, however peaked the row is.

Invariants: as in :mod:`shared.sampling.processors` a token is kept if fewer than k tokens, and less than top-p of the
probability, are strictly more likely, so ties are kept or removed together. A token's weight ``exp(-distance)`` is an
integer in units of 2^-44: integer sums do not depend on the order of additions, so the cuts of a row are the same in
every run and every batch. Tokens that min-p removes have no key, so they are neither counted nor summed.
"""

from shared.kernels.keys import (
    FARTHEST,
    distance_of,
    keys_of,
    load_farthest,
    load_kept,
    load_keys,
    load_limits,
    load_sharpness,
    mass_of,
    weight_of,
    widen,
)
from shared.kernels.launch import tl, triton

GROUP = tl.constexpr(32)  # logits of which one is sampled
SIGMAS = tl.constexpr(3.5)  # half the bracket's width, in standard deviations of the estimate
BRACKET_STEPS = tl.constexpr(20)  # of 31: a bound is exact to 2^-12 of itself


@triton.jit
def bracket_top_k(maxima, k):
    """A key up to which there are at least k of the groups' maxima, about the smallest."""
    low, high = tl.full([], -1, tl.int32), tl.full([], FARTHEST, tl.int32)
    for _ in range(BRACKET_STEPS):
        middle = low + (high - low) // 2
        is_reached = tl.sum((maxima <= middle).to(tl.int32), 0) >= k
        high = tl.where(is_reached, middle, high)
        low = tl.where(is_reached, low, middle)
    return high


@triton.jit
def bracket_top_p(sample, total, p, farthest):
    """Two keys between which the top-p cut very probably lies, from the keys of every GROUP-th token.

    Args:
        total: about the sum of all weights, those that min-p removes included.
    """
    weights = tl.where(sample <= FARTHEST, weight_of(tl.minimum(sample, FARTHEST)), 0.0) * GROUP
    total -= tl.sum(tl.where(sample > farthest, weights, 0.0), 0)
    weights = tl.where(sample > farthest, 0.0, weights)
    j = tl.arange(0, 2)
    side = (2 * j - 1).to(tl.float32)  # [2]: of the lower bound, and of the upper one
    target = (1 - p).to(tl.float32) * total - side * 1e-5 * total  # the sum is exact to fewer digits than p
    low, high = j * 0 - 1, j * 0 + FARTHEST
    for _ in range(BRACKET_STEPS):
        middle = low + (high - low) // 2
        beyond = tl.where(sample[None, :] > middle[:, None], weights[None, :], 0.0)  # [2, tokens of the sample]
        tail = tl.sum(beyond, 1)
        most = GROUP * weight_of(middle)  # what one token of the sample adds at most
        # Heavy tokens that the sample misses only raise the tail, so the lower bound need not allow for them.
        variance = tl.where(j == 0, tl.sum(beyond * beyond, 1), most * tail)
        deviation = SIGMAS * tl.sqrt(variance) + (j * SIGMAS * SIGMAS).to(tl.float32) * most
        is_reached = tail + side * deviation <= target
        high = tl.where(is_reached, middle, high)
        low = tl.where(is_reached, low, middle)
    return tl.max(tl.where(j == 0, low, -1), 0), tl.max(tl.where(j == 1, high, -1), 0)


@triton.jit
def bracket_kernel(
    logits,
    peaks,
    temperatures,
    log_min_p,
    top_k,
    top_p,
    maxima,
    block_values,
    block_sums,
    brackets,
    num_listed,
    vocabulary,
    row_stride,
    num_blocks,
    GROUPS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Store a row's bracket (low, high]: -1 is below all keys, and a row with top-k has this low.

    Branches on what the batch does not have are excluded at compile time: Triton 3.6 fails on loops and branches that
    it can prove dead.
    """
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + row)
    k, p = load_limits(top_k, top_p, row, vocabulary)
    if (temperature > 0) & ((k < vocabulary) | (p < 1)):
        peak = tl.load(peaks + row)
        farthest = load_farthest(log_min_p, row)
        low, high = tl.full([], -1, tl.int32), tl.full([], FARTHEST, tl.int32)
        num_groups = tl.cdiv(vocabulary, GROUP)
        g = tl.arange(0, GROUPS)
        if top_k is not None and k <= num_groups:
            high = bracket_top_k(load_keys(maxima + row * num_groups, g, num_groups, peak, temperature, farthest), k)
        if top_p is not None and (p < 1) & (k == vocabulary):
            b = tl.arange(0, BLOCKS)
            bests = tl.load(block_values + row * num_blocks + b, mask=b < num_blocks, other=float("nan"))
            keys = keys_of(bests, peak, temperature, FARTHEST)
            partial = tl.load(block_sums + row * num_blocks + b, mask=b < num_blocks, other=0.0)
            total = tl.sum(tl.where(keys <= FARTHEST, partial * weight_of(tl.minimum(keys, FARTHEST)), 0.0), 0)
            sample = load_keys(logits + row * row_stride, g * GROUP, vocabulary, peak, temperature, FARTHEST)
            low, high = bracket_top_p(sample, total, p, farthest)
        low = tl.where(low < 0, -1.0, low.to(tl.float32, bitcast=True))
        tl.store(brackets + 2 * row, low)
        tl.store(brackets + 2 * row + 1, widen(high.to(tl.float32, bitcast=True)))
        tl.store(num_listed + row, 0)


@triton.jit
def collect_kernel(
    logits,
    peaks,
    temperatures,
    log_min_p,
    top_k,
    top_p,
    brackets,
    num_listed,
    lists,
    block_masses,
    vocabulary,
    row_stride,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    temperature = tl.load(temperatures + row)
    k, p = load_limits(top_k, top_p, row, vocabulary)
    if (temperature > 0) & ((k < vocabulary) | (p < 1)):
        peak, sharpness = tl.load(peaks + row), load_sharpness(temperatures, row)
        ids = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        logit = load_kept(logits + row * row_stride, ids, vocabulary, peak, temperature, log_min_p, row)
        low, high = tl.load(brackets + 2 * row), tl.load(brackets + 2 * row + 1)
        distance = distance_of(logit, peak, sharpness)
        if top_p is not None and k == vocabulary:
            masses = mass_of(logit, peak, sharpness)
            at = block_masses + 2 * (row * tl.num_programs(0) + tl.program_id(0))
            tl.store(at, tl.sum(masses, 0))
            tl.store(at + 1, tl.sum(tl.where(distance <= low, masses, 0), 0))
        is_open = (distance > low) & (distance <= high)
        lists += row * vocabulary
        # Places in the list: a scan within groups of 8, which one thread does in registers, and one over the groups.
        within = tl.cumsum(tl.reshape(is_open.to(tl.int32), [BLOCK // 8, 8]), 1)
        counts = tl.max(within, 1)
        ends = tl.cumsum(counts, 0)
        places = tl.reshape(within + (ends - counts)[:, None], [BLOCK])
        num_open = tl.sum(counts, 0)
        if num_open > 0:
            lists += tl.atomic_add(num_listed + row, num_open, sem="relaxed") - 1
            tl.store(lists + places, logit, mask=is_open)
