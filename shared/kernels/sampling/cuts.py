"""Exact top-k and top-p cutoffs of a row of logits without sorting. Introduced in phase 3.1.

A token's distance from the row's maximum is ``(peak - logit) / temperature``. It is not negative, so its bits, read as
an integer, sort in the same order: its *key*. The top-k cutoff is the k-th smallest key. The top-p cutoff is the
smallest key up to which the probabilities sum to top-p. Tokens with a larger key are removed. Three launches find both:

    bracket  two programs per row estimate, from a sample of the row, two keys between which the cutoffs lie
    collect  one program per block sums the probability up to the lower key and that of all tokens, and appends
             the tokens between the two keys to a list: some thousands of the 128,000. A block is not loaded if its
             maximum lies beyond the upper key, and weighs nothing if the sum of all is needed
    search   one program per row tests whether the cutoffs are in the list, and finds them by bisection over integers,
             which ends at the exact key whatever the data. If they are not, it lists the whole row first, which is slow
             and practically never happens

So every logit is compared with two keys instead of many pivots, and the result never depends on the estimate. This is
the selection algorithm of Floyd and Rivest ("Expected time bounds for selection", 1975), extended to sums of
probability. FlashInfer's sorting-free sampling (arXiv 2501.01005) uses rejection instead: it samples, rejects tokens
that the cutoffs would remove, and samples again, which does not work with counter-based noise.

The estimate. For each group of ``GROUP`` logits, the estimate uses the maximum, found by the peak launch, and the first
logit. At least k tokens have keys up to the k-th of the maxima's. Top-p concerns the *tail*, the probability beyond a
key: the sample gives the tail, and the peak launch the total. A token in the tail weighs at most as much as the key
itself, so no heavy token that the sample misses can spoil the estimate, however peaked the row is.

Invariants: as in :mod:`shared.sampling.processors`, a token is kept if fewer than k tokens, with less than top-p of the
probability, are strictly more likely, so ties are kept or removed together. A token's weight ``exp(-distance)`` is an
integer in units of 2^-44: integer sums do not depend on the order of additions, so a row's cutoffs are the same in
every run and every batch. Tokens that min-p removes have no key, so they are neither counted nor summed.
"""

from shared.kernels.launch import launch_dependents, tl, triton, wait_for_previous
from shared.kernels.sampling.keys import (
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

GROUP = tl.constexpr(32)  # logits, one of which is sampled
SIGMAS = tl.constexpr(3.5)  # half the bracket's width, in standard deviations of the estimate
BRACKET_STEPS = tl.constexpr(16)  # of 31: a bound is exact to 2^-8 of itself
WEIGHTLESS = tl.constexpr(31.0)  # a distance at which a weight is less than one unit


@triton.jit
def bracket_top_k(maxima, k):
    """A key up to which at least k of the groups' maxima lie; approximately the smallest such key."""
    low, high = tl.full([], -1, tl.int32), tl.full([], FARTHEST, tl.int32)
    for _ in range(BRACKET_STEPS):
        middle = low + (high - low) // 2
        is_reached = tl.sum((maxima <= middle).to(tl.int32), 0) >= k
        high = tl.where(is_reached, middle, high)
        low = tl.where(is_reached, low, middle)
    return high


@triton.jit
def bracket_top_p(sample, total, p, farthest, is_upper):
    """A key that very probably bounds the top-p cutoff from below, or from above, estimated from every GROUP-th token.

    Args:
        total: approximately the sum of all weights, including those that min-p removes.
    """
    weights = tl.where(sample <= FARTHEST, weight_of(tl.minimum(sample, FARTHEST)), 0.0) * GROUP
    total -= tl.sum(tl.where(sample > farthest, weights, 0.0), 0)
    weights = tl.where(sample > farthest, 0.0, weights)
    side = tl.where(is_upper, 1.0, -1.0)
    target = (1 - p).to(tl.float32) * total - side * 1e-5 * total  # the sum is exact to fewer digits than p
    low, high = tl.full([], -1, tl.int32), tl.full([], FARTHEST, tl.int32)
    for _ in range(BRACKET_STEPS):
        middle = low + (high - low) // 2
        beyond = tl.where(sample > middle, weights, 0.0)
        tail = tl.sum(beyond, 0)
        # Heavy tokens that the sample misses only raise the tail, so the lower bound need not allow for them.
        most = tl.where(is_upper, GROUP * weight_of(middle), 0.0)  # the most that one token of the sample can add
        variance = most * tail
        if not is_upper:
            variance = tl.sum(beyond * beyond, 0)
        deviation = SIGMAS * tl.sqrt(variance) + SIGMAS * SIGMAS * most
        is_reached = tail + side * deviation <= target
        high = tl.where(is_reached, middle, high)
        low = tl.where(is_reached, low, middle)
    return tl.where(is_upper, high, low)


@triton.jit
def bracket_kernel(
    peaks, temperatures, log_min_p, top_k, top_p, maxima, samples, block_values, block_sums, brackets, num_listed,
    vocabulary, num_blocks,
    GROUPS: tl.constexpr, BLOCKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Store one side of a row's bracket (low, high]; -1 is below all keys, and is the low side for a row with top-k.

    Branches on features that the batch lacks are excluded at compile time: Triton 3.6 fails on loops and branches that
    it can prove dead.
    """
    row, is_upper = tl.program_id(1).to(tl.int64), tl.program_id(0) == 1
    temperature = tl.load(temperatures + row)
    k, p = load_limits(top_k, top_p, row, vocabulary)
    farthest = load_farthest(log_min_p, row)
    g = tl.arange(0, GROUPS)
    wait_for_previous(PDL)
    launch_dependents(PDL)
    if (temperature > 0) & ((k < vocabulary) | (p < 1)):
        peak = tl.load(peaks + row)
        bound = tl.where(is_upper, FARTHEST, -1)
        num_groups = tl.cdiv(vocabulary, GROUP)
        if top_k is not None and is_upper & (k <= num_groups):
            bound = bracket_top_k(load_keys(maxima + row * num_groups, g, num_groups, peak, temperature, farthest), k)
        if top_p is not None and (p < 1) & (k == vocabulary):
            b = tl.arange(0, BLOCKS)
            bests = tl.load(block_values + row * num_blocks + b, mask=b < num_blocks, other=float("nan"))
            keys = keys_of(bests, peak, temperature, FARTHEST)
            partial = tl.load(block_sums + row * num_blocks + b, mask=b < num_blocks, other=0.0)
            total = tl.sum(tl.where(keys <= FARTHEST, partial * weight_of(tl.minimum(keys, FARTHEST)), 0.0), 0)
            sample = load_keys(samples + row * num_groups, g, num_groups, peak, temperature, FARTHEST)
            bound = bracket_top_p(sample, total, p, farthest, is_upper)
        bound = tl.where(bound < 0, -1.0, bound.to(tl.float32, bitcast=True))
        tl.store(brackets + 2 * row + tl.program_id(0), tl.where(is_upper, widen(bound), bound))
        tl.store(num_listed + row, 0)


@triton.jit
def collect_kernel(
    logits, peaks, temperatures, log_min_p, top_k, top_p, block_values, brackets, num_listed, lists, block_masses,
    vocabulary, row_stride,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = (tl.num_programs(1) - 1 - tl.program_id(1)).to(tl.int64)  # the cache still holds what was read last
    temperature, sharpness = tl.load(temperatures + row), load_sharpness(temperatures, row)
    k, p = load_limits(top_k, top_p, row, vocabulary)
    wait_for_previous(PDL)
    launch_dependents(PDL)
    if (temperature > 0) & ((k < vocabulary) | (p < 1)):
        peak = tl.load(peaks + row)
        low, high = tl.load(brackets + 2 * row), tl.load(brackets + 2 * row + 1)
        block = row * tl.num_programs(0) + tl.program_id(0)
        mass, low_mass = tl.full([], 0, tl.int64), tl.full([], 0, tl.int64)
        reach = high
        if top_p is not None and k == vocabulary:
            reach = tl.maximum(high, WEIGHTLESS)
        if distance_of(tl.load(block_values + block), peak, sharpness) <= reach:
            ids = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
            logit = load_kept(logits + row * row_stride, ids, vocabulary, peak, temperature, log_min_p, row)
            distance = distance_of(logit, peak, sharpness)
            if top_p is not None and k == vocabulary:
                masses = mass_of(logit, peak, sharpness)
                mass, low_mass = tl.sum(masses, 0), tl.sum(tl.where(distance <= low, masses, 0), 0)
            is_open = (distance > low) & (distance <= high)
            num_open = tl.sum(is_open.to(tl.int32), 0)
            if num_open > 0:
                # Indices in the list come from three scans: within groups of 4, which a thread computes in registers;
                # over the thread's groups; and over the threads.
                within = tl.cumsum(tl.reshape(is_open.to(tl.int32), [BLOCK // 512, 128, 4]), 2)
                counts = tl.max(within, 2)
                ends = tl.cumsum(counts, 0)
                totals = tl.max(ends, 0)
                places = within + (ends - counts + (tl.cumsum(totals, 0) - totals)[None, :])[:, :, None]
                first = tl.atomic_add(num_listed + row, num_open, sem="relaxed") - 1
                tl.store(lists + row * vocabulary + first + tl.reshape(places, [BLOCK]), logit, mask=is_open)
        if top_p is not None and k == vocabulary:
            tl.store(block_masses + 2 * block, mass)
            tl.store(block_masses + 2 * block + 1, low_mass)
