"""The sum of a small tensor over the ranks, through memory that their GPUs share. Introduced in phase 12.1.

*One shot*: each rank writes its numbers into every other rank's memory, waits for theirs, and adds. *Two shots*, for
larger tensors: rank p gets piece p from every rank, adds, and writes the result into every other rank's memory. An
exchange takes two trips, but each of N ranks writes 2 (N - 1) / N times the tensor instead of N - 1 times. The kernel
also adds the residual.

Ranks exchange numbers only, no flags, in words of 32 bits, which a GPU writes and reads atomically. Memory starts out
filled with the word ``UNSENT``, a NaN. A rank reads its own memory until no awaited word is ``UNSENT``, and then resets
them all to ``UNSENT``. A value equal to ``UNSENT`` is sent as another NaN. This is the protocol of TensorRT-LLM's
Lamport kernels, whose word is -0.0; FlashInfer has them too, with one shot and with two.

A program sums a row, or part of one, and has a *channel*: two slots for the words of each other rank, and a counter of
its calls, whose parity chooses the slot. The counter is in memory rather than an argument, so a replayed CUDA graph
keeps counting. A word has the same index in a slot as among the program's words. From rank s, rank r receives the words
of piece r in the first shot, and those of piece s in the second.

Two slots are enough: rank B clears a slot in call n. It sends the words of call n + 1 after ``wait_for_previous``, when
the kernel of call n has ended and its writes are complete. Rank A writes to this slot again in call n + 2, so after its
call n + 1 has ended, which had to wait for those words from B. This requires each rank to send every other rank a word
in each call of a channel; so all programs of a call, and all pieces, have the same number of words.

Invariants: numbers are added in fp32 in the order of the ranks, so all ranks get the same bits, in every run, with one
shot or two; every rank makes the same calls in the same order, with the same residual; ``stop`` ends the wait for a
rank that is lost.
"""

from typing import Protocol

import torch
from torch import Tensor

from shared.kernels.launch import launch, launch_dependents, next_power_of_two, tl, triton, wait_for_previous

CHANNELS = 256  # programs at most
CHANNEL_WORDS = 4096  # 32-bit words of a slot: a row of 8,192 16-bit numbers
LEAST_WORDS = 512  # words of a part of a row
WARP_WORDS = 128  # so a thread has 16 bytes, and no two threads share a word, which one of them could clear too early
TWO_SHOT_BYTES = 512 << 10  # bytes of x, times the number of ranks beyond two, from which two shots are faster
DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}  # their names in Triton
UNSENT = tl.constexpr(-1)  # a NaN in 32 bits, and two in 16 bits
OTHER_NAN = tl.constexpr(0x7FFFFFFF)  # the same, except for the sign


class Peers(Protocol):
    """Memory that all ranks can reach: int32 ``[sender, slot, channel, word]`` at each of ``addresses``, initially all
    -1."""

    rank: int
    size: int
    addresses: Tensor  # int64 [size]: the address of each rank's memory in this GPU's address space; multiples of 16
    counters: Tensor  # int32 [CHANNELS]: calls so far
    stop: Tensor  # int32 [1]: 1 ends all waits


def num_words(size: int) -> int:
    """The number of 32-bit words in the memory of each of ``size`` ranks."""
    return size * 2 * CHANNELS * CHANNEL_WORDS


@triton.jit
def first_number(words, DTYPE: tl.constexpr):
    """The number in the lower half of each word, or in all of it, in fp32."""
    if tl.float32 == DTYPE:
        return words.to(tl.float32, bitcast=True)
    else:
        return (words & 0xFFFF).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)


@triton.jit
def second_number(words, DTYPE: tl.constexpr):
    """The number in the upper half of each word, in fp32; 0 if a word holds one number."""
    if tl.float32 == DTYPE:
        return tl.zeros(words.shape, tl.float32)
    else:
        return ((words >> 16) & 0xFFFF).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)


@triton.jit
def as_words(first, second, DTYPE: tl.constexpr):
    """Numbers in fp32, rounded and packed into words."""
    if tl.float32 == DTYPE:
        return first.to(tl.int32, bitcast=True)
    else:
        lower = first.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        return (second.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32) << 16) | lower


@triton.jit
def sendable(words):
    """The words with ``UNSENT``, which is never sent, replaced."""
    return tl.where(words == UNSENT, OTHER_NAN, words)


@triton.jit
def send(words, memories, offset, stride, inside, RANK: tl.constexpr, SIZE: tl.constexpr):
    """Write ``words[rank]`` at ``offset + rank * stride`` of each other rank's memory, starting with the next rank."""
    for step in tl.static_range(1, SIZE):
        outbox = memories[(RANK + step) % SIZE] + offset + (RANK + step) % SIZE * stride
        tl.store(outbox, words[(RANK + step) % SIZE], mask=inside)


@triton.jit
def receive(own, inbox, stride, inside, stop, RANK: tl.constexpr, SIZE: tl.constexpr):
    """The words of every rank: ``own``, and what each other rank writes at ``inbox + rank * stride``.

    All are read repeatedly until none is missing, and then cleared. Words that are not ``inside`` are not awaited.
    """
    words = (own,) * SIZE
    num_missing = 1
    while num_missing > 0:
        missing = tl.zeros(own.shape, tl.int32)
        words = ()
        for rank in tl.static_range(SIZE):
            if rank == RANK:
                words += (own,)
            else:
                words += (tl.load(inbox + rank * stride, mask=inside, other=0, volatile=True),)
            missing += (words[rank] == UNSENT).to(tl.int32)
        # all threads agree, so they leave the loop together
        num_missing = tl.sum(missing * (1 - tl.load(stop, volatile=True)))
    for rank in tl.static_range(SIZE):
        if rank != RANK:
            tl.store(inbox + rank * stride, UNSENT, mask=inside)
    return words


@triton.jit
def all_reduce_kernel(
    x, residual, addresses, counters, stop, summed, num_words,
    DTYPE: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr, PIECES: tl.constexpr,
    CHANNELS: tl.constexpr, CHANNEL_WORDS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program has ``PIECES`` pieces of ``num_words`` words: one with one shot, ``SIZE`` with two."""
    launch_dependents(PDL)
    channel = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    inside = i < num_words
    memories = ()  # type: tuple
    for rank in tl.static_range(SIZE):
        memories += (tl.multiple_of(tl.load(addresses + rank).to(tl.pointer_type(tl.int32)), 16),)
    wait_for_previous(PDL)
    call = tl.load(counters + channel) + 1
    at = channel * PIECES * num_words + i
    stride = num_words if PIECES > 1 else 0  # distance from one rank's piece to the next one's
    mine = RANK * stride
    pieces = ()  # type: tuple
    for piece in tl.static_range(PIECES):
        pieces += (sendable(tl.load(x + at + piece * num_words, mask=inside, other=0)),)
    pieces = pieces * (SIZE // PIECES)
    if residual is not None:
        added = tl.load(residual + at + mine, mask=inside, other=0)
    sender_words = 2 * CHANNELS * CHANNEL_WORDS
    offset = ((call & 1) * CHANNELS + channel) * CHANNEL_WORDS + i
    outbox, inbox = RANK * sender_words + offset, memories[RANK] + offset
    send(pieces, memories, outbox, stride, inside, RANK, SIZE)
    terms = receive(pieces[RANK], inbox + mine, sender_words, inside, stop, RANK, SIZE)
    first = first_number(terms[0], DTYPE)
    second = second_number(terms[0], DTYPE)
    for rank in tl.static_range(1, SIZE):
        first += first_number(terms[rank], DTYPE)
        second += second_number(terms[rank], DTYPE)
    if residual is not None:
        first += first_number(added, DTYPE)
        second += second_number(added, DTYPE)
    total = sendable(as_words(first, second, DTYPE))
    if PIECES > 1:
        send((total,) * SIZE, memories, outbox + mine, 0, inside, RANK, SIZE)
        totals = receive(total, inbox, sender_words + stride, inside, stop, RANK, SIZE)
        for rank in tl.static_range(SIZE):
            tl.store(summed + at + rank * stride, totals[rank], mask=inside)
    else:
        tl.store(summed + at, total, mask=inside)
    tl.store(counters + channel, call)


def fits(x: Tensor) -> bool:
    """Whether :func:`all_reduce` supports x ``[T, n]``."""
    num_words = x.shape[-1] * x.itemsize // 4
    is_whole = x.shape[-1] * x.itemsize % 4 == 0
    return x.dtype in DTYPES and is_whole and num_words <= CHANNEL_WORDS and x.shape[0] <= CHANNELS


def all_reduce(x: Tensor, peers: Peers, residual: Tensor | None = None) -> Tensor:
    """The sum over the ranks of x ``[T, n]``, plus ``residual`` ``[T, n]``, rounded: ``[T, n]`` in the dtype of x.

    x must be supported, and ``residual`` the same on all ranks.
    """
    summed = torch.empty_like(x, memory_format=torch.contiguous_format)
    if x.numel() == 0:
        return summed

    def words(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.contiguous().view(torch.int32)

    num_words, num_programs, num_pieces = x.shape[-1] * x.itemsize // 4, x.shape[0], 1
    while num_words % 2 == 0 and num_words // 2 >= LEAST_WORDS and 2 * num_programs <= CHANNELS:
        num_words, num_programs = num_words // 2, 2 * num_programs  # several programs share a row
    if x.nbytes * (peers.size - 2) >= TWO_SHOT_BYTES and num_words % peers.size == 0:
        num_words, num_pieces = num_words // peers.size, peers.size
    block = max(WARP_WORDS, next_power_of_two(num_words))
    launch(
        all_reduce_kernel, (num_programs,),
        words(x), words(residual), peers.addresses, peers.counters, peers.stop, words(summed), num_words,
        DTYPE=getattr(tl, DTYPES[x.dtype]), RANK=peers.rank, SIZE=peers.size, PIECES=num_pieces,
        CHANNELS=CHANNELS, CHANNEL_WORDS=CHANNEL_WORDS, BLOCK=block, num_warps=min(16, block // WARP_WORDS),
    )  # fmt: skip
    return summed
