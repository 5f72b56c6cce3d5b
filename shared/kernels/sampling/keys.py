"""A token's distance from the maximum, as an integer key, a probability and a fast estimate. Introduced in phase 3.1.

The distance is ``(peak - logit) / temperature``. It is not negative, so its bits, read as an integer, sort in the same
order; this integer is the token's *key*. Keys decide which tokens are kept, so the GPU and the CPU keep the same
tokens. A division takes as long as ten other instructions, so estimates, bounds and probabilities multiply by the
*sharpness* instead, the inverse of the temperature. Invariant: all of these are monotonic in the logit.
"""

from shared.kernels.launch import tl, triton

MAX_VOCABULARY = 2**18  # the sum of this many weights, each at most 2^44 units, fits in 63 bits

UNITS = tl.constexpr(2.0**44)
FARTHEST = tl.constexpr(0x7F800000)  # the key of an infinite distance
NO_KEY = tl.constexpr(0x7FFFFFFF)  # above every key


@triton.jit
def load_farthest(log_min_p, row):
    """The largest key that min-p keeps in a row; ``FARTHEST`` without min-p."""
    farthest = tl.full([], FARTHEST, tl.int32)
    if log_min_p is not None:
        farthest = tl.abs(tl.load(log_min_p + row)).to(tl.int32, bitcast=True)
    return farthest


@triton.jit
def keys_of(logit, peak, temperature, farthest):
    """The keys of logits; ``NO_KEY`` for keys above ``farthest`` and for NaN."""
    distance = tl.where(logit == peak, 0.0, tl.div_rn(peak - logit, temperature))
    keys = distance.to(tl.int32, bitcast=True)
    return tl.where(keys <= farthest, keys, NO_KEY)


@triton.jit
def load_keys(logits, ids, vocabulary, peak, temperature, farthest):
    """The keys of the tokens ``ids``; ``NO_KEY`` also past the vocabulary's end."""
    logit = tl.load(logits + ids, mask=ids < vocabulary, other=float("nan")).to(tl.float32)
    return keys_of(logit, peak, temperature, farthest)


@triton.jit
def weight_of(key):
    return tl.exp(-key.to(tl.float32, bitcast=True))


@triton.jit
def load_sharpness(temperatures, row):
    """Approximately 1 / temperature: good enough for estimates, and for probabilities, where equal logits must give
    equal results."""
    return 1 / tl.maximum(tl.load(temperatures + row), 1e-37)


@triton.jit
def distance_of(logit, peak, sharpness):
    """The approximate distance of logits, without a division; NaN for NaN."""
    return tl.where(logit == peak, 0.0, (peak - logit) * sharpness)


@triton.jit
def widen(distance):
    """An upper bound on :func:`distance_of` for exact distances up to ``distance``."""
    return distance * (1 + 1e-5) + 1e-5


@triton.jit
def mass_of(logit, peak, sharpness):
    """The weights of logits in units of 2^-44, int64; none for NaN."""
    distance = distance_of(logit, peak, sharpness)
    return (tl.where(distance >= 0, tl.exp(-distance), 0.0) * UNITS).to(tl.int64)


@triton.jit
def load_limits(top_k, top_p, row, vocabulary):
    """The row's k (the vocabulary's size if there is no limit) and p (1 if there is no limit)."""
    k = tl.full([], 0, tl.int64) + vocabulary
    p = tl.full([], 1.0, tl.float64)
    if top_k is not None:
        k = tl.minimum(tl.load(top_k + row), k)
    if top_p is not None:
        p = tl.load(top_p + row)
    return k, p


@triton.jit
def load_kept(logits, ids, vocabulary, peak, temperature, log_min_p, row):
    """The logits of the tokens ``ids``; NaN for those that min-p removes and past the vocabulary's end."""
    logit = tl.load(logits + ids, mask=ids < vocabulary, other=float("nan")).to(tl.float32)
    if log_min_p is not None:
        keys = keys_of(logit, peak, temperature, load_farthest(log_min_p, row))
        logit = tl.where(keys <= FARTHEST, logit, float("nan"))
    return logit
