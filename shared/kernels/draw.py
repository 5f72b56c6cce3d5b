"""Gumbel noise for the kept tokens of each row, and the arg-max of the sums. Introduced in phase 3.1.

The draw is a matter of instructions, not of bytes: ten rounds of Philox for four tokens, and two exact logarithms for
each. Two bounds save most of the work that cannot change the result:

- the noise is made of 23 random bits, so it lies between -2.82 and 16.64, and a token further than their difference
  below the maximum loses to the token at the maximum, which is never removed. A block of such tokens draws no noise;
- ``-log(-log(u))`` is at most ``-log(1 - u)``, and close to it for the large noise that wins. That, and a distance
  without a division, gives a bound on each score. The exact score is computed for the token with the largest bound,
  and for all tokens of the block only if another's bound reaches it.
"""

from shared.kernels.keys import load_farthest, load_keys, load_limits, load_sharpness, weight_of, widen
from shared.kernels.launch import tl, triton
from shared.kernels.peak import store_best

REACH = tl.constexpr(20.0)  # a distance that no noise makes up for
EXACT = tl.constexpr(1024)  # tokens whose exact scores are held at a time
SLACK = tl.constexpr(1e-3)  # more than the rounding errors of a score and of its bound


@triton.jit
def load_uniform(seed, index, first_id, STREAM: tl.constexpr, BLOCK: tl.constexpr):
    """:func:`shared.sampling.noise.uniform` at BLOCK ids from ``first_id``, a multiple of four, on."""
    groups = first_id // 4 + tl.arange(0, BLOCK // 4)
    w0, w1, w2, w3 = tl.philox(seed, groups, index.to(tl.int32), STREAM, 0)
    words = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [BLOCK])
    return (words >> 9).to(tl.float32) * 2.0**-23 + 2.0**-24  # exact


@triton.jit
def gumbel_of(uniform):
    return -tl.log(-tl.log(uniform))


@triton.jit
def bound_of(uniform):
    """An upper bound of the noise, at most 0.07 too large for noise above 4.

    It is ``-log(1 - u)``, with a logarithm that is linear between powers of two: the exponent and the mantissa of a
    float, read as one integer.
    """
    bits = (1 - uniform).to(tl.int32, bitcast=True).to(tl.float32)
    return 127 * 0.6931471805599453 + SLACK - bits * (0.6931471805599453 / 2**23)


@triton.jit
def load_scores(
    logits,
    first_id,
    vocabulary,
    peak,
    temperature,
    farthest,
    top_k_cut,
    top_p_cut,
    seed,
    index,
    STREAM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The exact scores of BLOCK tokens from ``first_id``, a multiple of four, on; -inf for removed tokens."""
    keys = load_keys(logits, first_id + tl.arange(0, BLOCK), vocabulary, peak, temperature, farthest)
    # Tokens tie in top-p if their weights are equal, even if the distances differ in the last bit.
    is_kept = (keys <= top_p_cut) | ((keys <= top_k_cut) & (weight_of(keys) == weight_of(top_p_cut)))
    noise = gumbel_of(load_uniform(seed, index, first_id, STREAM, BLOCK))
    return tl.where(is_kept, noise - keys.to(tl.float32, bitcast=True), float("-inf"))


@triton.jit
def draw_kernel(
    logits,
    peaks,
    temperatures,
    seeds,
    indices,
    log_min_p,
    top_k,
    top_p,
    cuts,
    block_values,
    block_ids,
    ids_out,
    counters,
    vocabulary,
    row_stride,
    STREAM: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    temperature = tl.load(temperatures + row)
    if temperature > 0:  # greedy rows are done
        logits += row * row_stride
        first_id = tl.program_id(0) * BLOCK
        ids = first_id + tl.arange(0, BLOCK)
        peak, sharpness = tl.load(peaks + row), load_sharpness(temperatures, row)
        seed, index = tl.load(seeds + row), tl.load(indices + row)
        farthest = load_farthest(log_min_p, row)
        top_k_cut, top_p_cut = farthest, farthest
        k, p = load_limits(top_k, top_p, row, vocabulary)
        if cuts is not None and (k < vocabulary) | (p < 1):
            top_k_cut, top_p_cut = tl.load(cuts + 2 * row), tl.load(cuts + 2 * row + 1)
        reach = tl.minimum(top_p_cut, farthest).to(tl.float32, bitcast=True)
        reach = tl.minimum(widen(reach), REACH)
        logit = tl.load(logits + ids, mask=ids < vocabulary, other=float("-inf")).to(tl.float32)
        # 0 for NaN: what must not be chosen may have a bound, since the exact scores exclude it. For an infinite
        # maximum the difference is NaN too.
        distance = (peak - logit) * sharpness
        distance = tl.where(distance > 0, distance, 0.0)
        best, at = tl.full([], float("-inf"), tl.float32), tl.full([], 0, tl.int32)
        if tl.min(distance, 0) <= reach:
            uniform = load_uniform(seed, index, first_id, STREAM, BLOCK)
            bounds = tl.where(distance <= reach, bound_of(uniform) - distance, float("-inf"))
            at = tl.argmax(bounds, 0)
            group = at // 4 * 4
            scores = load_scores(
                logits, first_id + group, vocabulary, peak, temperature, farthest, top_k_cut, top_p_cut, seed, index,
                STREAM, 4,
            )  # fmt: skip
            best = tl.max(tl.where(tl.arange(0, 4) == at - group, scores, float("-inf")), 0)
            if tl.sum((bounds >= best).to(tl.int32), 0) > 1:
                best, at = tl.full([], float("-inf"), tl.float32), at * 0
                for start in range(0, BLOCK, EXACT):
                    some_scores = load_scores(
                        logits, first_id + start, vocabulary, peak, temperature, farthest, top_k_cut, top_p_cut, seed,
                        index, STREAM, EXACT,
                    )  # fmt: skip
                    some_best, some_at = tl.max(some_scores, 0, return_indices=True)
                    at = tl.where(some_best > best, start + some_at, at)
                    best = tl.maximum(best, some_best)
        store_best(best, first_id + at, block_values, block_ids, ids_out, counters + 2 * row + 1, BLOCKS)
