"""The sum of a small tensor over the ranks, through memory that their GPUs share. Introduced in phase 12.1.

One shot: each rank writes its numbers into every other rank's memory, waits for theirs, and adds. Nothing is sent to
say that numbers have come: each 64 bits on the wire are 32 bits of numbers and the number of the call, and a GPU writes
and reads 64 bits at once, so a rank reads its own memory until every word has the number (NCCL's "LL" protocol). What
follows the sum is done before the result is written: the addition of the residual, and the norm behind it.

A program sums a row, or a part of one, and has a *channel*: two slots for the words of each other rank, and a counter
of its calls. The counter is in memory, and not an argument, so a replayed CUDA graph counts on. Two slots are enough: a
rank that writes call n + 2 has read call n + 1 of every rank, which wrote it after it had read call n.

Invariants: numbers are added in fp32 in the order of the ranks, so all ranks have the same bits, again in each run;
every rank makes the same calls in the same order; ``stop`` ends the wait for a rank that has gone.
"""

from typing import Protocol

import torch

from shared.kernels.launch import launch, launch_dependents, next_power_of_two, tl, triton, wait_for_previous
from shared.kernels.rmsnorm import Norm

CHANNELS = 256  # programs at most
CHANNEL_WORDS = 4096  # of 32 bits, in a slot: a row of 8,192 numbers in 16 bits
LEAST_WORDS = 512  # of a part of a row
DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}  # their names in Triton


class Peers(Protocol):
    """Memory that all ranks reach: ``[sender, slot, channel, word]`` of 64 bits at each of ``addresses``."""

    rank: int
    size: int
    addresses: torch.Tensor  # int64 [size]: of each rank's memory, as this GPU sees it
    counters: torch.Tensor  # int32 [CHANNELS]: calls so far
    stop: torch.Tensor  # int32 [1]: 1 ends all waiting


def num_words(size: int) -> int:
    """Words of 64 bits of the memory of each of ``size`` ranks."""
    return size * 2 * CHANNELS * CHANNEL_WORDS


@triton.jit
def first_number(words, DTYPE: tl.constexpr):
    """The number in the lower bits of each word, or in all of it, in fp32."""
    if tl.float32 == DTYPE:
        return words.to(tl.float32, bitcast=True)
    else:
        return (words & 0xFFFF).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)


@triton.jit
def second_number(words, DTYPE: tl.constexpr):
    """The number in the upper bits of each word, in fp32; 0 if it has one number."""
    if tl.float32 == DTYPE:
        return tl.zeros(words.shape, tl.float32)
    else:
        return ((words >> 16) & 0xFFFF).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)


@triton.jit
def as_words(first, second, DTYPE: tl.constexpr):
    """Numbers in fp32, rounded, as words."""
    if tl.float32 == DTYPE:
        return first.to(tl.int32, bitcast=True)
    else:
        lower = first.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        return (second.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32) << 16) | lower


@triton.jit
def all_reduce_kernel(
    x,
    residual,
    weight,
    addresses,
    counters,
    stop,
    summed,
    normed,
    num_words,
    row_numbers,
    eps,
    DTYPE: tl.constexpr,
    OFFSET: tl.constexpr,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    CHANNELS: tl.constexpr,
    CHANNEL_WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    launch_dependents(PDL)
    channel = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    inside = i < num_words
    at = channel * num_words + i
    mine = tl.load(addresses + RANK).to(tl.pointer_type(tl.int64))
    if weight is not None:
        scales = tl.load(weight + i, mask=inside, other=0)
    wait_for_previous(PDL)
    call = tl.load(counters + channel) + 1
    words = tl.load(x + at, mask=inside, other=0)
    if residual is not None:
        added = tl.load(residual + at, mask=inside, other=0)
    place = ((call & 1) * CHANNELS + channel) * CHANNEL_WORDS + i
    numbered = (call.to(tl.int64) << 32) | (words.to(tl.int64) & 0xFFFFFFFF)
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            theirs = tl.load(addresses + peer).to(tl.pointer_type(tl.int64))
            tl.store(theirs + RANK * 2 * CHANNELS * CHANNEL_WORDS + place, numbered, mask=inside)
    tl.debug_barrier()
    first = tl.zeros([BLOCK], tl.float32)
    second = tl.zeros([BLOCK], tl.float32)
    for peer in tl.static_range(SIZE):
        if peer == RANK:
            term = words
        else:
            inbox = mine + peer * 2 * CHANNELS * CHANNEL_WORDS + place
            received = tl.load(inbox, mask=inside, other=0, volatile=True)
            num_missing = tl.sum((((received >> 32).to(tl.int32) != call) & inside).to(tl.int32))
            while num_missing > 0:
                is_stopped = tl.load(stop, volatile=True)
                received = tl.load(inbox, mask=inside, other=0, volatile=True)
                num_missing = tl.sum((((received >> 32).to(tl.int32) != call) & inside).to(tl.int32)) * (1 - is_stopped)
            term = received.to(tl.int32)
        first += first_number(term, DTYPE)
        second += second_number(term, DTYPE)
    tl.store(counters + channel, call)
    if residual is not None:
        first += first_number(added, DTYPE)
        second += second_number(added, DTYPE)
    total = as_words(first, second, DTYPE)
    tl.store(summed + at, total, mask=inside)
    if weight is not None:
        first = first_number(total, DTYPE)
        second = second_number(total, DTYPE)
        scale = tl.rsqrt((tl.sum(first * first) + tl.sum(second * second)) / row_numbers + eps)
        first *= scale * (first_number(scales, DTYPE) + OFFSET)
        second *= scale * (second_number(scales, DTYPE) + OFFSET)
        tl.store(normed + at, as_words(first, second, DTYPE), mask=inside)


def fits(x: torch.Tensor) -> bool:
    """Whether :func:`all_reduce` takes x ``[T, n]``."""
    num_words = x.shape[-1] * x.itemsize // 4
    is_whole = x.shape[-1] * x.itemsize % 4 == 0
    return x.dtype in DTYPES and is_whole and num_words <= CHANNEL_WORDS and x.shape[0] <= CHANNELS


def all_reduce(
    x: torch.Tensor, peers: Peers, residual: torch.Tensor | None = None, norm: Norm | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The sum over the ranks of x ``[T, n]``, plus ``residual``, rounded; and its norm if there is one."""
    summed = torch.empty_like(x, memory_format=torch.contiguous_format)
    normed = None if norm is None else torch.empty_like(summed)
    if x.numel() == 0:
        return summed, normed

    def words(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor.contiguous().view(torch.int32)

    num_words, num_parts = x.shape[-1] * x.itemsize // 4, 1
    if norm is None:  # which needs a whole row; without, more programs share a row
        while num_words % 2 == 0 and num_words // 2 >= LEAST_WORDS and 2 * num_parts * x.shape[0] <= CHANNELS:
            num_words, num_parts = num_words // 2, 2 * num_parts
    block = next_power_of_two(num_words)
    launch(
        all_reduce_kernel,
        (x.shape[0] * num_parts,),
        words(x),
        words(residual),
        None if norm is None else words(norm.weight),
        peers.addresses,
        peers.counters,
        peers.stop,
        words(summed),
        words(normed),
        num_words,
        x.shape[-1],
        0.0 if norm is None else norm.eps,
        DTYPE=getattr(tl, DTYPES[x.dtype]),
        OFFSET=0.0 if norm is None else norm.offset,
        RANK=peers.rank,
        SIZE=peers.size,
        CHANNELS=CHANNELS,
        CHANNEL_WORDS=CHANNEL_WORDS,
        BLOCK=block,
        num_warps=min(16, max(4, block // 128)),
    )
    return summed, normed
