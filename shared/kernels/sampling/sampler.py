"""The sampler on the GPU: the same tokens as ``shared.sampling.sampler.sample``. Introduced in phase 3.1.

PyTorch needs dozens of operations for a row with top-k and top-p, two of which sort the whole vocabulary. Here each row
is divided into blocks of logits, one program each, and the launches run in order:

    peak     the maximum logit and its token: the result of a greedy row; other rows subtract the maximum
    bracket, collect, search   the top-k and top-p cutoffs of rows that have them (:mod:`shared.kernels.sampling.cuts`)
    draw     Gumbel noise for the remaining tokens, and the arg-max (:mod:`shared.kernels.sampling.draw`)

Min-p needs no launch: its cutoff is a distance from the maximum, which is already known. Logit biases and penalties are
applied before the launches, by PyTorch, to a copy of the logits in a batch that has any.

The launches overlap (:mod:`shared.kernels.launch`). Each waits before it permits the next one to start, and the first
loads nothing before its wait. So everything that a launch loads before its wait is complete, except what the previous
launch writes: the parameters and the logits.

Above about 50 MB, the cache cannot hold all logits until the next pass over them. So every second pass reads the rows
in reverse order, and still finds in the cache the rows that the previous pass loaded last.

Invariants: the noise is that of :mod:`shared.sampling.noise`, word for word; divisions and comparisons match the CPU's
bit for bit, so only exponentials, logarithms and sums may round differently; ties go to the lowest id; a row's token
does not depend on other rows; the host reads nothing.
"""

import torch

from shared.kernels.launch import launch, launches, next_power_of_two, triton
from shared.kernels.sampling.cuts import GROUP, bracket_kernel, collect_kernel
from shared.kernels.sampling.draw import draw_kernel
from shared.kernels.sampling.keys import MAX_VOCABULARY
from shared.kernels.sampling.peak import peak_kernel
from shared.kernels.sampling.search import search_kernel
from shared.sampling import sampler as op
from shared.sampling.noise import Stream
from shared.sampling.sampler import SamplingBatch, adjust_logits

# logits: up to this many, small blocks give every multiprocessor work; above, large blocks start fewer programs
FEW_ROWS = 16
FEW_BLOCK, FEW_WARPS = 1024, 4  # logits per program
MANY_BLOCK, MANY_WARPS = 2048, 4
BRACKET_WARPS, SEARCH_WARPS = 8, 16  # for the programs that handle one side of a row's bracket, or a row
COLLECT_REGISTERS = 72  # the limit at which seven programs fit on a multiprocessor: each waits for its threads
LIST_TILE = 8192  # collected logits that the searching program holds in registers
ARRIVALS = 2  # counters per row: arrived programs of the peak launch and of the draw launch


def make_counters(num_rows: int, device: torch.device) -> torch.Tensor:
    """The arrival counters of each row, int32 zeros."""
    return torch.zeros(num_rows, ARRIVALS, dtype=torch.int32, device=device)


def sample(
    logits: torch.Tensor, batch: SamplingBatch, *, stream: Stream = Stream.DRAW, counters: torch.Tensor | None = None
) -> torch.Tensor:
    """:func:`shared.sampling.sampler.sample` with the same arguments, result and noise.

    A batch of greedy rows takes one launch; with sampling rows it takes two, and with top-k or top-p five. Raises
    ValueError also for a vocabulary above ``MAX_VOCABULARY``.

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
    block, num_warps = (FEW_BLOCK, FEW_WARPS) if B <= FEW_ROWS else (MANY_BLOCK, MANY_WARPS)
    num_blocks, num_groups = triton.cdiv(V, block), triton.cdiv(V, int(GROUP))
    grid = (num_blocks, B)
    blocks = next_power_of_two(num_blocks)
    shape = (V, logits.stride(0))
    by_block = {"BLOCK": block, "num_warps": num_warps}
    has_cuts = batch.top_k is not None or batch.top_p is not None
    counters = make_counters(B, logits.device) if counters is None else counters

    def scratch(*size: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(B, *size, dtype=dtype, device=logits.device)

    peaks, block_values = scratch(dtype=torch.float32), scratch(num_blocks, dtype=torch.float32)
    block_ids, block_scores = scratch(num_blocks), scratch(num_blocks, dtype=torch.float32)
    maxima = scratch(num_groups, dtype=torch.float32) if has_cuts else None
    samples = scratch(num_groups, dtype=torch.float32) if batch.top_p is not None else None
    block_sums = scratch(num_blocks, dtype=torch.float32) if has_cuts else None
    launch(
        peak_kernel, grid,
        logits, batch.temperature, block_values, block_ids, peaks, ids, maxima, samples, block_sums, counters, *shape,
        BLOCKS=blocks, **by_block,
    )  # fmt: skip
    if batch.temperature is None:
        return ids
    limits = (batch.log_min_p, batch.top_k, batch.top_p)
    cuts = None
    if has_cuts:
        rows = (peaks, batch.temperature, *limits)
        brackets, lists = scratch(2, dtype=torch.float32), scratch(V, dtype=torch.float32)
        num_listed, cuts = scratch(), scratch(2)
        masses = scratch(num_blocks, 2, dtype=torch.int64)
        launch(
            bracket_kernel, (2, B),
            *rows, maxima, samples, block_values, block_sums, brackets, num_listed, V, num_blocks,
            GROUPS=next_power_of_two(num_groups), BLOCKS=blocks, num_warps=BRACKET_WARPS,
        )  # fmt: skip
        launch(
            collect_kernel, grid,
            logits, *rows, block_values, brackets, num_listed, lists, masses, *shape,
            **by_block, maxnreg=COLLECT_REGISTERS,
        )  # fmt: skip
        launch(
            search_kernel, (B,),
            logits, *rows, num_listed, lists, masses, cuts, *shape, num_blocks,
            BLOCKS=blocks, LIST_TILE=LIST_TILE, num_warps=SEARCH_WARPS,
        )  # fmt: skip
    launch(
        draw_kernel, grid,
        logits, peaks, batch.temperature, batch.seeds, batch.indices, *limits, cuts, block_values, block_scores,
        block_ids, ids, counters, *shape,
        STREAM=int(stream), BLOCKS=blocks, **by_block,
    )  # fmt: skip
    return ids
