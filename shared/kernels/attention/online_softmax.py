"""One step of online softmax: updates attention with a tile of keys and values. Introduced in phase 6.

The part of phase 3.1's kernel that every later attention kernel shares: running maximum, sum and weighted values, in
fp32 (Milakov & Gimelshein, arXiv 1805.02867; Dao et al., arXiv 2205.14135). Invariant: a row without visible keys so
far has maximum -inf, sum 0 and values 0.
"""

from shared.kernels.launch import tl, triton


@triton.jit
def add_tile(queries, k, v, is_visible, maximum, total, weighted, scale, softcap, HAS_SOFTCAP: tl.constexpr):
    """Update the state of ROWS rows with TILE keys.

    Args:
        queries: ``[ROWS, D]``.
        k, v: ``[TILE, D]``, finite also where they are masked.
        is_visible: the attention mask; broadcasts to ``[ROWS, TILE]``.
        maximum, total, weighted: ``[ROWS]`` of scores in base 2, ``[ROWS]``, ``[ROWS, D]``, relative to the maximum.
        scale, softcap: as :func:`in_base_2` gives them.
    """
    weights, kept, maximum, total = weigh(queries, k, is_visible, maximum, total, scale, softcap, HAS_SOFTCAP)
    weighted = weighted * kept[:, None]
    weighted += tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    return maximum, total, weighted


@triton.jit
def weigh(queries, k, is_visible, maximum, total, scale, softcap, HAS_SOFTCAP: tl.constexpr):
    """The part of :func:`add_tile` without values: their weights ``[ROWS, TILE]`` relative to the new maximum, what
    earlier values are multiplied by, ``[ROWS]``, the new maximum and the new total."""
    scores = tl.dot(queries, tl.trans(k), input_precision="ieee") * scale
    if HAS_SOFTCAP:  # cap · tanh(x), with exp(2x) = 2^scores by the launcher's choice of the scale
        scores = softcap * (1.0 - 2.0 / (tl.exp2(scores) + 1.0))
    scores = tl.where(is_visible, scores, float("-inf"))
    new_maximum = tl.maximum(maximum, tl.max(scores, 1))
    base = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)  # -inf - -inf is NaN
    weights = tl.exp2(scores - base[:, None])
    kept = tl.exp2(maximum - base)
    return weights, kept, new_maximum, total * kept + tl.sum(weights, 1)


LOG2_E = 1.4426950408889634


def in_base_2(scale: float, softcap: float | None) -> tuple[float, float]:
    """The scale and softcap of :func:`add_tile`, whose exponentials are powers of two."""
    if softcap is None:
        return scale * LOG2_E, 0.0
    return 2 * LOG2_E * scale / softcap, softcap * LOG2_E
