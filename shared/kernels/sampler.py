"""The sampler on the GPU: the same tokens as ``shared.sampling.sampler.sample``. Introduced in phase 3.1.

PyTorch needs dozens of operations for a row with top-k and top-p, two of which sort the whole vocabulary. Here each row
is divided into blocks of logits, one program each, and the launches run in order:

    peak     the maximum logit and its token: the result of a greedy row; other rows subtract the maximum
    narrow, narrow, collect: the top-k and top-p cutoffs of rows that have them, see :mod:`shared.kernels.cuts`
    draw     Gumbel noise for the remaining tokens, and the arg-max

The draw computes noise only for blocks that can win. The noise is made of 23 random bits, so it lies between -2.82 and
16.64, and a token further than their difference below the maximum loses to the token at the maximum, which is never
removed: without top-k and top-p too, a block of unlikely tokens needs no noise.

Min-p needs no launch: its cutoff is a distance from the maximum, which is known before. Logit biases and penalties are
applied before the launches, by PyTorch, to a copy of the logits in a batch that has any.

Invariants: the noise is that of :mod:`shared.sampling.noise`, word by word; divisions and comparisons are those of the
CPU bit by bit, so only the rounding of exponentials, logarithms and sums differs; ties go to the lowest id; a row's
token does not depend on other rows; the host reads nothing.
"""

import torch

from shared.kernels.arrival import is_last_arrival
from shared.kernels.cuts import (
    ARRIVALS,
    FARTHEST,
    MAX_VOCABULARY,
    NARROWINGS,
    ROW_SUMS,
    collect_kernel,
    load_farthest,
    load_keys,
    load_limits,
    narrow_kernel,
    weight_of,
)
from shared.kernels.launch import launch, launches, next_power_of_two, tl, triton
from shared.sampling import sampler as op
from shared.sampling.noise import Stream
from shared.sampling.sampler import SamplingBatch, adjust_logits

BLOCK = 1024  # logits per program
NUM_WARPS = 4
REACH = tl.constexpr(0x41A00000)  # the key of a distance of 20: no noise makes up for more
LIST_TILE = 2048  # collected keys that the searching program holds in registers


@triton.jit
def store_best(values, ids, block_values, block_ids, ids_out, counter, BLOCKS: tl.constexpr):
    """The arg-max of a row, of which this program has ``values`` at ``ids``; returns whether it is final, and its max.

    Blocks and ids ascend, so the first of tied values has the lowest id.
    """
    block, num_blocks = tl.program_id(0), tl.num_programs(0)
    row = tl.program_id(1).to(tl.int64)
    best, at = tl.max(values, 0, return_indices=True)
    first = row * num_blocks
    tl.store(block_values + first + block, best)
    tl.store(block_ids + first + block, tl.min(ids, 0) + at)
    is_last = is_last_arrival(counter, num_blocks)
    if is_last:
        b = tl.arange(0, BLOCKS)
        bests = tl.load(block_values + first + b, mask=b < num_blocks, other=float("-inf"), cache_modifier=".cg")
        best, at = tl.max(bests, 0, return_indices=True)
        tl.store(ids_out + row, tl.load(block_ids + first + at, cache_modifier=".cg").to(tl.int64))
    return is_last, best


@triton.jit
def peak_kernel(
    logits,
    block_values,
    block_ids,
    peaks,
    ids_out,
    sums,
    vocabulary,
    row_stride,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    ids = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(logits + row * row_stride + ids, mask=ids < vocabulary, other=float("-inf")).to(tl.float32)
    values = tl.where(values == values, values, float("-inf"))  # NaN is never chosen
    counter = sums + row * ROW_SUMS + ARRIVALS
    is_last, peak = store_best(values, ids, block_values, block_ids, ids_out, counter, BLOCKS)
    if is_last:
        tl.store(peaks + row, peak)


@triton.jit
def load_gumbel(seed, index, first_id, STREAM: tl.constexpr, BLOCK: tl.constexpr):
    """:func:`shared.sampling.noise.gumbel` at BLOCK ids from ``first_id``, a multiple of four, on."""
    groups = first_id // 4 + tl.arange(0, BLOCK // 4)
    w0, w1, w2, w3 = tl.philox(seed, groups, index.to(tl.int32), STREAM, 0)
    words = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [BLOCK])
    uniform = ((words >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07  # 2^-23
    return -tl.log(-tl.log(uniform))


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
    sums,
    vocabulary,
    row_stride,
    STREAM: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    temperature = tl.load(temperatures + row)
    if temperature > 0:  # greedy rows are done
        first_id = tl.program_id(0) * BLOCK
        ids = first_id + tl.arange(0, BLOCK)
        farthest = load_farthest(log_min_p, row)
        keys = load_keys(logits + row * row_stride, ids, vocabulary, tl.load(peaks + row), temperature, farthest)
        is_kept = keys <= FARTHEST
        k, p = load_limits(top_k, top_p, row, vocabulary)
        if cuts is not None and (k < vocabulary) | (p < 1):
            top_k_cut, top_p_cut = tl.load(cuts + 2 * row), tl.load(cuts + 2 * row + 1)
            # Tokens tie in top-p if their weights are equal, even if the distances differ in the last bit.
            is_kept = (keys <= top_p_cut) | ((keys <= top_k_cut) & (weight_of(keys) == weight_of(top_p_cut)))
        scores = tl.full([BLOCK], float("-inf"), tl.float32)
        if tl.max((is_kept & (keys <= REACH)).to(tl.int32), 0) > 0:
            noise = load_gumbel(tl.load(seeds + row), tl.load(indices + row), first_id, STREAM, BLOCK)
            scores = tl.where(is_kept, noise - keys.to(tl.float32, bitcast=True), float("-inf"))
        store_best(scores, ids, block_values, block_ids, ids_out, sums + row * ROW_SUMS + ARRIVALS + 2, BLOCKS)


def make_counters(num_rows: int, device: torch.device) -> torch.Tensor:
    """The sums and counters of each row: int64 zeros, ``[rows, ROW_SUMS]``."""
    return torch.zeros(num_rows, int(ROW_SUMS), dtype=torch.int64, device=device)


def sample(
    logits: torch.Tensor,
    batch: SamplingBatch,
    *,
    stream: Stream = Stream.DRAW,
    counters: torch.Tensor | None = None,
) -> torch.Tensor:
    """:func:`shared.sampling.sampler.sample` with the same arguments, result and noise.

    A batch of greedy rows takes one launch, a batch that draws two, with top-k or top-p five. Raises ValueError also
    for a vocabulary above ``MAX_VOCABULARY``.

    Args:
        counters: from :func:`make_counters`, for at least as many rows. Passing them saves the launch that makes them.
            They are zero again when the call ends, so calls on one stream can share them.
    """
    if not launches(logits):
        return op.sample(logits, batch, stream=stream)
    B, V = logits.shape
    if batch.num_rows != B:
        raise ValueError(f"logits have {B} rows, the sampling batch has {batch.num_rows}")
    if V > MAX_VOCABULARY:
        raise ValueError(f"the vocabulary has {V} tokens; the sampler's sums support up to {MAX_VOCABULARY}")
    logits = adjust_logits(logits, batch)
    ids = torch.empty(B, dtype=torch.int64, device=logits.device)
    if B == 0:
        return ids
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    num_blocks = triton.cdiv(V, BLOCK)
    grid = (num_blocks, B)
    blocks = next_power_of_two(num_blocks)
    shape = (V, logits.stride(0))
    has_cuts = batch.top_k is not None or batch.top_p is not None
    sums = make_counters(B, logits.device) if counters is None or has_cuts else counters
    floats = torch.empty(B * (num_blocks + 1), dtype=torch.float32, device=logits.device)
    block_values, peaks = floats[B:], floats[:B]
    block_ids = torch.empty(B * num_blocks, dtype=torch.int32, device=logits.device)

    launch(
        peak_kernel,
        grid,
        logits,
        block_values,
        block_ids,
        peaks,
        ids,
        sums,
        *shape,
        BLOCK=BLOCK,
        BLOCKS=blocks,
        num_warps=NUM_WARPS,
    )
    if batch.temperature is None:
        return ids
    limits = (batch.log_min_p, batch.top_k, batch.top_p)
    cuts = None
    if has_cuts:
        rows = (logits, peaks, batch.temperature, *limits, sums)
        for narrowing in range(int(NARROWINGS)):
            launch(narrow_kernel, grid, *rows, *shape, NARROWING=narrowing, BLOCK=BLOCK, num_warps=NUM_WARPS)
        lists = torch.empty(B, V, dtype=torch.int32, device=logits.device)
        cuts = torch.empty(B, 2, dtype=torch.int32, device=logits.device)
        launch(
            collect_kernel,
            grid,
            *rows,
            lists,
            cuts,
            *shape,
            BLOCK=BLOCK,
            LIST_TILE=LIST_TILE,
            num_warps=NUM_WARPS,
        )
    launch(
        draw_kernel,
        grid,
        logits,
        peaks,
        batch.temperature,
        batch.seeds,
        batch.indices,
        *limits,
        cuts,
        block_values,
        block_ids,
        ids,
        sums,
        *shape,
        STREAM=int(stream),
        BLOCK=BLOCK,
        BLOCKS=blocks,
        num_warps=NUM_WARPS,
    )
    return ids
