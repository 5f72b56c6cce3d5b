"""Online softmax: attention over a paged KV cache, a tile of tokens at a time. Introduced in phase 6.

Running maximum, sum and weighted values, in fp32 (Milakov & Gimelshein, arXiv 1805.02867; Dao et al., arXiv
2205.14135). :func:`attend` is the loop of every decode kernel; kernels differ in the rows of queries, the tokens that a
program reads, and where those tokens are stored. The loops over a prompt's keys are in
:mod:`shared.kernels.attention.prompt_tiles`. Invariants: only tokens that are read need a block table entry; a row
without visible keys so far has maximum -inf, sum 0 and values 0.
"""

from shared.kernels.e4m3 import for_product, scale_of, widened, widened_pair
from shared.kernels.launch import tl, triton


@triton.jit
def attend(
    queries, cache, kv_head, start, end,
    locate: tl.constexpr, where, scale, softcap, TILE: tl.constexpr, kept=None, KEYS_FIRST: tl.constexpr = False,
):  # fmt: skip
    """Attend to the tokens ``start`` to ``end`` of a KV head: maximum, total and weighted values, as :func:`add_tile`.

    Args:
        queries: ``[ROWS, D]``.
        cache: keys, values, and their scales: fp32 ``[Hkv]``, or None for numbers that are stored unscaled.
        locate, where: ``locate(tokens, end, *where)`` gives the offsets of tokens in keys and values, int64.
        scale, softcap: as :func:`shared.kernels.attention.decode_attention.in_base_2` gives them.
        kept: uint8, one bit per token that says whether it is visible, and the number of tokens that have a bit; later
            tokens are visible. None: there are no bits.
        KEYS_FIRST: whether a tile's keys are loaded before its values, which is faster in the longest loops.
    """
    keys, values, k_scales, v_scales = cache
    ROWS: tl.constexpr = queries.shape[0]
    D: tl.constexpr = queries.shape[1]
    # A decode step is bound by loads, and e4m3 values load faster in pairs (:func:`widened_pair`).
    PAIRED: tl.constexpr = values.dtype.element_ty == tl.uint8 or values.dtype.element_ty == tl.float8e4nv
    d = tl.arange(0, D)
    queries = for_product(queries, keys)
    scale *= scale_of(k_scales, kv_head, keys)
    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    weighted = tl.zeros([ROWS, D], tl.float32)
    if PAIRED:
        pairs = values.to(tl.pointer_type(tl.uint16), bitcast=True)
        even, odd = tl.zeros([ROWS, D // 2], tl.float32), tl.zeros([ROWS, D // 2], tl.float32)
    # Block table entries are loaded one tile ahead, so that a tile's loads do not wait for a lookup.
    rows = locate(start + tl.arange(0, TILE), end, *where)
    for tile in tl.range(start, end, TILE):
        token = tile + tl.arange(0, TILE)
        is_key = token < end
        if kept is not None:
            masks, covered = kept
            bits = tl.load(masks + token // 8, mask=token < covered, other=255)
            is_key &= (bits >> (token % 8).to(tl.uint8)) & 1 == 1
        at = rows[:, None] + d[None, :]  # [TILE, D]
        if PAIRED:
            v = tl.load(pairs + (rows // 2)[:, None] + tl.arange(0, D // 2)[None, :], mask=is_key[:, None], other=0)
        elif not KEYS_FIRST:
            v = widened(tl.load(values + at, mask=is_key[:, None], other=0.0), queries.dtype)
        rows = locate(token + TILE, end, *where)
        k = widened(tl.load(keys + at, mask=is_key[:, None], other=0.0), queries.dtype)
        if KEYS_FIRST and not PAIRED:
            v = widened(tl.load(values + at, mask=is_key[:, None], other=0.0), queries.dtype)
        if PAIRED:
            weights, kept_part, maximum, total = weigh(queries, k, is_key[None, :], maximum, total, scale, softcap)
            low, high = widened_pair(v, queries.dtype)
            even = even * kept_part[:, None] + tl.dot(weights.to(low.dtype), low, input_precision="ieee")
            odd = odd * kept_part[:, None] + tl.dot(weights.to(high.dtype), high, input_precision="ieee")
        else:
            maximum, total, weighted = add_tile(
                queries, k, v, is_key[None, :], maximum, total, weighted, scale, softcap
            )
    if PAIRED:
        weighted = tl.reshape(tl.join(even, odd), [ROWS, D]) * (tl.load(v_scales + kv_head) * 256.0)
    else:
        weighted *= scale_of(v_scales, kv_head, values)
    return maximum, total, weighted


@triton.jit
def add_tile(queries, k, v, is_visible, maximum, total, weighted, scale, softcap):
    """Update the state of ROWS rows with TILE keys.

    Args:
        queries: ``[ROWS, D]``.
        k, v: ``[TILE, D]``, finite even where they are masked.
        is_visible: the attention mask; broadcasts to ``[ROWS, TILE]``. None: all keys are visible to all rows.
        maximum, total, weighted: ``[ROWS]``, of scores in base 2; ``[ROWS]`` and ``[ROWS, D]``, relative to the
            maximum.
        scale, softcap: as :func:`shared.kernels.attention.decode_attention.in_base_2` gives them.
    """
    weights, kept, maximum, total = weigh(queries, k, is_visible, maximum, total, scale, softcap)
    weighted = weighted * kept[:, None]
    weighted += tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    return maximum, total, weighted


@triton.jit
def weigh(queries, k, is_visible, maximum, total, scale, softcap):
    """The part of :func:`add_tile` that needs no values: the weights ``[ROWS, TILE]`` relative to the new maximum, the
    factor for earlier values ``[ROWS]``, the new maximum and the new total."""
    scores = tl.dot(queries, tl.trans(k), input_precision="ieee")
    if is_visible is None and softcap is None:  # scaled and subtracted in one step: a single instruction per score
        new_maximum = tl.maximum(maximum, tl.max(scores, 1) * scale)
        base = new_maximum
        weights = tl.exp2(scores * scale - base[:, None])
    else:
        scores *= scale
        if softcap is not None:  # cap · tanh(x), with exp(2x) = 2^scores because of how the launcher chose the scale
            scores = softcap * (1.0 - 2.0 / (tl.exp2(scores) + 1.0))
        if is_visible is not None:
            scores = tl.where(is_visible, scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        base = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)  # -inf - -inf is NaN
        weights = tl.exp2(scores - base[:, None])
    kept = tl.exp2(maximum - base)
    return weights, kept, new_maximum, total * kept + tl.sum(weights, 1)
