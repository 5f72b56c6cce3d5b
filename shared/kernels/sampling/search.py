"""The exact top-k and top-p cutoffs of a row, found in the list that contains them. Introduced in phase 3.1.

The third launch of :mod:`shared.kernels.sampling.cuts`. A list has tokens in any order; sums of integers do not
depend on it. Each step of the search tests a key, and moves one end to a listed key. The tested key is where the cutoff
would be if the mass grew evenly between the ends; this leaves about the square root of the tokens (Perl, Itai and Avni,
"Interpolation search", 1978). Every eighth key halves the range, whatever the data.
"""

from shared.kernels.launch import launch_dependents, tl, triton, wait_for_previous
from shared.kernels.sampling.keys import FARTHEST, keys_of, load_kept, load_limits, load_sharpness, mass_of

HALVING = tl.constexpr(8)  # one in this many keys halves the range
REST = tl.constexpr(1024)  # tokens of a list that is longer than the registers hold, loaded at once in each step


@triton.jit
def load_listed(lists, num_listed, start, peak, temperature, TILE: tl.constexpr):
    """Some listed logits and their keys."""
    i = start + tl.arange(0, TILE)
    logit = tl.load(lists + i, mask=i < num_listed, other=float("nan"))
    return logit, keys_of(logit, peak, temperature, FARTHEST)


@triton.jit
def masses_of(logit, keys, peak, sharpness, COUNTS: tl.constexpr):
    """The masses of listed logits; with ``COUNTS`` each is 1."""
    return (keys <= FARTHEST).to(tl.int32) if COUNTS else mass_of(logit, peak, sharpness)


@triton.jit
def listed_mass(
    held, held_masses, lists, num_listed, high, peak, temperature, sharpness, COUNTS: tl.constexpr,
    LIST_TILE: tl.constexpr,
):  # fmt: skip
    """The mass of the listed tokens with keys up to ``high``. The first tile of the list is held in registers."""
    mass = tl.sum(tl.where(held <= high, held_masses, 0), 0)
    for start in range(LIST_TILE, num_listed, REST):
        logit, keys = load_listed(lists, num_listed, start, peak, temperature, REST)
        mass += tl.sum(tl.where(keys <= high, masses_of(logit, keys, peak, sharpness, COUNTS), 0), 0)
    return mass


@triton.jit
def last_key(held, lists, num_listed, high, peak, temperature, LIST_TILE: tl.constexpr):
    """The largest listed key up to ``high``; -1 if there is none."""
    found = tl.max(tl.where(held <= high, held, -1), 0)
    for start in range(LIST_TILE, num_listed, REST):
        _, keys = load_listed(lists, num_listed, start, peak, temperature, REST)
        found = tl.maximum(found, tl.max(tl.where(keys <= high, keys, -1), 0))
    return found


@triton.jit
def next_key(held, lists, num_listed, low, peak, temperature, LIST_TILE: tl.constexpr):
    """The smallest listed key above ``low``; ``FARTHEST`` if there is none."""
    found = tl.min(tl.where(held > low, held, FARTHEST), 0)
    for start in range(LIST_TILE, num_listed, REST):
        _, keys = load_listed(lists, num_listed, start, peak, temperature, REST)
        found = tl.minimum(found, tl.min(tl.where(keys > low, keys, FARTHEST), 0))
    return tl.minimum(found, FARTHEST)


@triton.jit
def find_cut(
    held, held_masses, lists, num_listed, limit, high, low_mass, high_mass, peak, temperature, sharpness,
    COUNTS: tl.constexpr, LIST_TILE: tl.constexpr,
):  # fmt: skip
    """The smallest key up to which the masses of the listed tokens, plus ``low_mass``, reach ``limit``; ``high`` if
    there is none.

    Args:
        high_mass: the mass up to ``high``, in and below the list.
    """
    low = next_key(held, lists, num_listed, -1, peak, temperature, LIST_TILE) - 1
    last = last_key(held, lists, num_listed, high, peak, temperature, LIST_TILE)
    below, above = low_mass.to(tl.float64), high_mass.to(tl.float64)  # the masses up to both ends
    low, high = tl.where(last < 0, -1, low), tl.where((last < 0) | (above < limit), high, last)
    step = tl.full([], 0, tl.int32)
    while high - low > 1:
        share = tl.where((step % HALVING != HALVING - 1) & (above > below), (limit - below) / (above - below), 0.5)
        share = tl.minimum(tl.maximum(share, 0.0), 1.0).to(tl.float32)
        middle = low + (share * (high - low).to(tl.float32)).to(tl.int32)
        middle = tl.minimum(tl.maximum(middle, low + 1), high - 1)
        step += 1
        mass = low_mass + listed_mass(
            held, held_masses, lists, num_listed, middle, peak, temperature, sharpness, COUNTS, LIST_TILE
        )
        if mass.to(tl.float64) >= limit:  # no listed key lies between the new end and the middle
            above = mass.to(tl.float64)
            high = tl.maximum(last_key(held, lists, num_listed, middle, peak, temperature, LIST_TILE), 0)
        else:
            below = mass.to(tl.float64)
            low = next_key(held, lists, num_listed, middle, peak, temperature, LIST_TILE) - 1
    return high


@triton.jit
def search_kernel(
    logits, peaks, temperatures, log_min_p, top_k, top_p, num_listed, lists, block_masses, cuts, vocabulary, row_stride,
    num_blocks,
    BLOCKS: tl.constexpr, LIST_TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Store a row's cutoffs: the largest key that top-k keeps, and the largest that both keep."""
    row = tl.program_id(0).to(tl.int64)
    temperature, sharpness = tl.load(temperatures + row), load_sharpness(temperatures, row)
    k, p = load_limits(top_k, top_p, row, vocabulary)
    wait_for_previous(PDL)
    launch_dependents(PDL)
    if (temperature > 0) & ((k < vocabulary) | (p < 1)):
        peak, length = tl.load(peaks + row), tl.load(num_listed + row)
        lists += row * vocabulary
        top_k_cut = tl.full([], FARTHEST, tl.int32)
        if top_k is not None and k < vocabulary:
            # The list is certain to contain the cutoff: it begins at the peak, and has at least k tokens.
            logit, held = load_listed(lists, length, 0, peak, temperature, LIST_TILE)
            ones = masses_of(logit, held, peak, sharpness, True)
            top_k_cut = find_cut(
                held, ones, lists, length, k.to(tl.float64), top_k_cut, length * 0, length, peak, temperature,
                sharpness, True, LIST_TILE,
            )  # fmt: skip
        top_p_cut = top_k_cut
        if top_p is not None and p < 1:
            logit, held = load_listed(lists, length, 0, peak, temperature, LIST_TILE)
            masses = mass_of(logit, peak, sharpness)
            low_mass = tl.full([], 0, tl.int64)
            mass = listed_mass(held, masses, lists, length, top_k_cut, peak, temperature, sharpness, False, LIST_TILE)
            high_mass = mass
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
                    low_mass, high_mass = tl.full([], 0, tl.int64), mass
                    logit, held = load_listed(lists, length, 0, peak, temperature, LIST_TILE)
                    masses = mass_of(logit, peak, sharpness)
            top_p_cut = find_cut(
                held, masses, lists, length, p * mass.to(tl.float64), top_k_cut, low_mass, high_mass, peak, temperature,
                sharpness, False, LIST_TILE,
            )  # fmt: skip
        tl.store(cuts + 2 * row, top_k_cut)
        tl.store(cuts + 2 * row + 1, top_p_cut)
