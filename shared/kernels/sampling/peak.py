"""The maximum of each row of logits, its token, and the starting values of the search for cutoffs. Introduced in phase
3.1."""

from shared.kernels.arrival import is_last_arrival
from shared.kernels.launch import launch_dependents, tl, triton, wait_for_previous
from shared.kernels.sampling.cuts import GROUP
from shared.kernels.sampling.keys import load_sharpness

LEAST = tl.constexpr(-3e38)  # a finite number below all finite maxima: -inf - -inf would be NaN


@triton.jit
def store_best(best, best_id, row, block_values, block_ids, ids_out, counter, BLOCKS: tl.constexpr):
    """The arg-max of ``row``, where this program found ``best`` at ``best_id``.

    Returns whether this program is the row's last and, if so, the row's maximum. Blocks ascend, so the first of tied
    values has the lowest id.
    """
    block, num_blocks = tl.program_id(0), tl.num_programs(0)
    first = row * num_blocks
    tl.store(block_values + first + block, best)
    tl.store(block_ids + first + block, best_id)
    is_last = is_last_arrival(counter, num_blocks)
    if is_last:
        b = tl.arange(0, BLOCKS)
        bests = tl.load(block_values + first + b, mask=b < num_blocks, other=float("-inf"), cache_modifier=".cg")
        best, at = tl.max(bests, 0, return_indices=True)
        tl.store(ids_out + row, tl.load(block_ids + first + at, cache_modifier=".cg").to(tl.int64))
    return is_last, best


@triton.jit
def peak_kernel(
    logits, temperatures, block_values, block_ids, peaks, ids_out, maxima, samples, block_sums, counters, vocabulary,
    row_stride,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """``maxima``, ``samples`` and ``block_sums`` are None unless cutoffs are needed. They hold each group's maximum,
    its first value, and each block's sum of weights relative to the block's maximum."""
    wait_for_previous(PDL)
    launch_dependents(PDL)
    row = tl.program_id(1).to(tl.int64)
    first_id = tl.program_id(0) * BLOCK
    ids = first_id + tl.arange(0, BLOCK)
    values = tl.load(logits + row * row_stride + ids, mask=ids < vocabulary, other=float("-inf")).to(tl.float32)
    values = tl.where(values == values, values, float("-inf"))  # NaN is never chosen
    best, at = tl.max(values, 0, return_indices=True)
    if maxima is not None:
        num_groups = tl.cdiv(vocabulary, GROUP)
        g = tl.program_id(0) * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
        tops = tl.max(tl.reshape(values, [BLOCK // GROUP, GROUP]), 1)
        tl.store(maxima + row * num_groups + g, tops, mask=g < num_groups)
        if samples is not None:
            firsts = tl.where(
                tl.arange(0, GROUP)[None, :] == 0, tl.reshape(values, [BLOCK // GROUP, GROUP]), float("-inf")
            )
            tl.store(samples + row * num_groups + g, tl.max(firsts, 1), mask=g < num_groups)
        weights = tl.exp((values - tl.maximum(best, LEAST)) * load_sharpness(temperatures, row))
        tl.store(block_sums + row * tl.num_programs(0) + tl.program_id(0), tl.sum(weights, 0))
    counter = counters + 2 * row
    is_last, peak = store_best(best, first_id + at, row, block_values, block_ids, ids_out, counter, BLOCKS)
    if is_last:
        tl.store(peaks + row, peak)
