"""Adds Gumbel noise to each row's remaining tokens, and takes the arg-max. Introduced in phase 3.1.

Sampling is bound by instructions, not by bytes: ten rounds of Philox per four tokens, and two exact logarithms per
token. Two bounds save most of the work that cannot change the result:

- the noise is made from 23 random bits, so it lies between -2.82 and 16.64, and a token further than their difference
  below the maximum loses to the token at the maximum, which is never removed. A block of such tokens, or of removed
  ones, is not even loaded: its maximum is known;
- ``-log(-log(u))`` is at most ``-log(1 - u)``, and close to it for the large noise that wins. This, and a distance
  computed without a division, gives a bound on each score. Exact scores are computed in the order of the bounds, until
  no bound exceeds the best score: in most blocks, for one token.
"""

from shared.kernels.launch import launch_dependents, tl, triton, wait_for_previous
from shared.kernels.sampling.keys import (
    distance_of,
    load_farthest,
    load_keys,
    load_limits,
    load_sharpness,
    weight_of,
    widen,
)
from shared.kernels.sampling.peak import store_best

REACH = tl.constexpr(20.0)  # a distance that no noise can outweigh
SLACK = tl.constexpr(1e-3)  # more than the rounding errors of a score and its bound


@triton.jit
def load_uniform(seed, index, first_id, STREAM: tl.constexpr, BLOCK: tl.constexpr):
    """:func:`shared.sampling.noise.uniform` for BLOCK ids from ``first_id`` on, a multiple of four.

    Unlike Triton's own Philox, it takes both halves of a product from one multiplication.
    """
    c0 = (first_id // 4 + tl.arange(0, BLOCK // 4)).to(tl.uint32)
    c1, c2, c3 = index.to(tl.uint32), tl.full([], STREAM, tl.uint32), tl.full([], 0, tl.uint32)
    k0, k1 = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    for _ in tl.static_range(10):
        even, odd = c0.to(tl.uint64) * 0xD2511F53, c2.to(tl.uint64) * 0xCD9E8D57
        c0, c1 = (odd >> 32).to(tl.uint32) ^ c1 ^ k0, odd.to(tl.uint32)
        c2, c3 = (even >> 32).to(tl.uint32) ^ c3 ^ k1, even.to(tl.uint32)
        k0, k1 = k0 + 0x9E3779B9, k1 + 0xBB67AE85
    words = tl.reshape(tl.join(tl.join(c0, c2), tl.join(c1, c3)), [BLOCK])
    return (words >> 9).to(tl.float32) * 2.0**-23 + 2.0**-24  # exact


@triton.jit
def gumbel_of(uniform):
    return -tl.log(-tl.log(uniform))


@triton.jit
def bound_of(uniform):
    """An upper bound on the noise, at most 0.07 too large for noise above 4.

    It is ``-log(1 - u)``, with a logarithm that is linear between powers of two: a float's exponent and mantissa, read
    as one integer.
    """
    bits = (1 - uniform).to(tl.int32, bitcast=True).to(tl.float32)
    return 127 * 0.6931471805599453 + SLACK - bits * (0.6931471805599453 / 2**23)


@triton.jit
def load_score(
    logits, token_id, vocabulary, peak, temperature, farthest, top_k_cut, top_p_cut, seed, index, STREAM: tl.constexpr
):
    """The exact score of a token; -inf if it is removed."""
    i = tl.arange(0, 4)
    first_id = token_id // 4 * 4
    keys = load_keys(logits, first_id + i, vocabulary, peak, temperature, farthest)
    # Tokens tie in top-p if their weights are equal, even if the distances differ in the last bit.
    is_kept = (keys <= top_p_cut) | ((keys <= top_k_cut) & (weight_of(keys) == weight_of(top_p_cut)))
    scores = gumbel_of(load_uniform(seed, index, first_id, STREAM, 4)) - keys.to(tl.float32, bitcast=True)
    return tl.max(tl.where(is_kept & (first_id + i == token_id), scores, float("-inf")), 0)


@triton.jit
def draw_kernel(
    logits, peaks, temperatures, seeds, indices, log_min_p, top_k, top_p, cuts, peak_values, block_values, block_ids,
    ids_out, counters, vocabulary, row_stride,
    STREAM: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """``peak_values`` are the blocks' maxima; ``block_values`` receives the blocks' best scores."""
    row = tl.program_id(1).to(tl.int64)
    if cuts is None:
        row = tl.num_programs(1) - 1 - row  # the cache still holds what the previous launch read last
    temperature, sharpness = tl.load(temperatures + row), load_sharpness(temperatures, row)
    seed, index = tl.load(seeds + row), tl.load(indices + row)
    farthest = load_farthest(log_min_p, row)
    k, p = load_limits(top_k, top_p, row, vocabulary)
    wait_for_previous(PDL)
    launch_dependents(PDL)
    if temperature > 0:  # greedy rows are finished
        logits += row * row_stride
        peak = tl.load(peaks + row)
        nearest = distance_of(tl.load(peak_values + row * tl.num_programs(0) + tl.program_id(0)), peak, sharpness)
        top_k_cut, top_p_cut = farthest, farthest
        if cuts is not None and (k < vocabulary) | (p < 1):
            top_k_cut, top_p_cut = tl.load(cuts + 2 * row), tl.load(cuts + 2 * row + 1)
        reach = tl.minimum(top_p_cut, farthest).to(tl.float32, bitcast=True)
        reach = tl.minimum(widen(reach), REACH)
        first_id = tl.program_id(0) * BLOCK
        best, best_id = tl.full([], float("-inf"), tl.float32), first_id
        tl.static_assert(BLOCK <= 4096)
        if nearest <= reach:
            ids = first_id + tl.arange(0, BLOCK)
            logit = tl.load(logits + ids, mask=ids < vocabulary, other=float("nan")).to(tl.float32)
            distance = distance_of(logit, peak, sharpness)
            bounds = bound_of(load_uniform(seed, index, first_id, STREAM, BLOCK)) - distance
            # An integer in steps of 2^-13 from -32 on, with the index in the block: a single maximum finds both.
            bounds = ((bounds + 1056).to(tl.int32, bitcast=True) << 12) + tl.arange(0, BLOCK)
            bounds = tl.where(distance <= reach, bounds, -1)
            top = tl.max(bounds, 0)
            while (top >= 0) & ((top >> 12) * 2.0**-13 - 32 > best):
                token_id = first_id + top % 4096
                score = load_score(
                    logits, token_id, vocabulary, peak, temperature, farthest, top_k_cut, top_p_cut, seed, index, STREAM
                )
                is_better = (score > best) | ((score == best) & (token_id < best_id))
                best, best_id = tl.where(is_better, score, best), tl.where(is_better, token_id, best_id)
                top = tl.max(tl.where(bounds < top, bounds, -1), 0)
        store_best(best, best_id, row, block_values, block_ids, ids_out, counters + 2 * row + 1, BLOCKS)
