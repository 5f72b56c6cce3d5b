"""Counter-based random numbers: noise is a pure function of seed and index. Introduced in phase 2.

With a stateful generator, a request's tokens depend on what ran before it in the same process. Philox4x32-10 (Salmon et
al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC'11) maps (key, counter) to four 32-bit words without any state,
so a row's noise is the same alone, in a batch of fifty, on another device, or recomputed after a preemption.

Layout, which a GPU sampler reproduces with ``tl.philox(seed, vocabulary_index // 4, index, stream, 0)``:

    key      (low 32 bits of the seed, high 32 bits of the seed)
    counter  (vocabulary index // 4, index of the token in its request, stream, 0)
    output   word number (vocabulary index % 4)

Invariant: the noise depends on (seed, index, stream, vocabulary index) alone, never on the batch or on the
vocabulary's size. The words are the same everywhere; the logarithms of ``gumbel`` may differ between devices by an ulp.
"""

from enum import IntEnum

import torch

Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]

_ROUNDS = 10
_BROADCAST_ROUNDS = 2  # after two rounds the first word has mixed into all four, so all have the full shape
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)

# Tensors without dimensions act as scalars on every device, and avoid the conversion that each use of a Python int
# costs.
_MULTIPLIER_0 = torch.tensor(0xD2511F53)
_MULTIPLIER_1 = torch.tensor(0xCD9E8D57)
_MASK = torch.tensor(0xFFFFFFFF)
_HALF = torch.tensor(32)


class Stream(IntEnum):
    """The purposes of random numbers. Numbers of different streams at the same index are independent."""

    DRAW = 0  # a token from the model's distribution
    DRAFT = 1  # a token proposed by a draft model
    ACCEPT = 2  # whether a proposed token is accepted
    RESIDUAL = 3  # the token that replaces a rejected one
    REPLACEMENT = 4  # the word that replaces the end of thinking (phase 11.1)


def seed_pattern(seed: int) -> int:
    """The signed 64-bit integer with the bits of ``seed`` (0 to 2^64 - 1), as an int64 tensor stores it."""
    return seed - 2**64 if seed >= 2**63 else seed


def philox(counter: Words, key: tuple[torch.Tensor, torch.Tensor]) -> Words:
    """Philox4x32-10: four 32-bit words for each counter, equal to those of Random123 and of ``tl.philox``.

    The four words of the counter, the two of the key (low, high) and the results are int64 tensors with values 0 to
    2^32 - 1; counter and key broadcast against each other.
    """
    c0, c1, c2, c3 = counter
    keys = list(zip(*(_round_keys(word, step) for word, step in zip(key, _KEY_STEPS, strict=True)), strict=True))
    # Only a product's operands need their upper halves cleared: c1 and c3 carry full products until the end. A product
    # may wrap around the sign of int64; its bits are those of the unsigned product, and the mask drops shifted-in sign
    # bits.
    for k0, k1 in keys[:_BROADCAST_ROUNDS]:
        p0, p1 = c0 * _MULTIPLIER_0, c2 * _MULTIPLIER_1
        c0, c1, c2, c3 = ((p1 >> _HALF) ^ c1 ^ k0) & _MASK, p1, ((p0 >> _HALF) ^ c3 ^ k1) & _MASK, p0
    # From here each word is a separate tensor, and together they have the shape of all arguments.
    # torch.broadcast_shapes would import SymPy, which takes most of a second.
    c0, c1, c2, c3 = (word.contiguous() for word in torch.broadcast_tensors(c0, c1, c2, c3))
    p0, p1 = torch.empty_like(c0), torch.empty_like(c0)
    for k0, k1 in keys[_BROADCAST_ROUNDS:]:  # the same round in six buffers, which fit in a processor's cache
        torch.mul(c0, _MULTIPLIER_0, out=p0)
        torch.mul(c2, _MULTIPLIER_1, out=p1)
        torch.bitwise_right_shift(p1, _HALF, out=c0).bitwise_xor_(c1).bitwise_xor_(k0).bitwise_and_(_MASK)
        torch.bitwise_right_shift(p0, _HALF, out=c2).bitwise_xor_(c3).bitwise_xor_(k1).bitwise_and_(_MASK)
        c1, c3, p0, p1 = p1, p0, c3, c1
    return c0, c1.bitwise_and_(_MASK), c2, c3.bitwise_and_(_MASK)


def _round_keys(key: torch.Tensor, step: int) -> tuple[torch.Tensor, ...]:
    """The key word of each round: it grows by ``step`` modulo 2^32."""
    growth = torch.arange(_ROUNDS, device=key.device) * step
    return ((key + growth.view(-1, *[1] * key.dim())) & _MASK).unbind(0)


def uniform(seeds: torch.Tensor, indices: torch.Tensor, stream: Stream, size: int) -> torch.Tensor:
    """Uniform numbers for B rows: float32 [B, size], in steps of 2^-23 from 2^-24 to 1 - 2^-24, so neither 0 nor 1.

    ``seeds`` is int64 [B], each the bits of a 64-bit seed (``seed_pattern``). ``indices`` are integers [B] that count a
    request's tokens; their low 32 bits are used. ``stream`` is the purpose of the numbers. The numbers are on the
    device of ``seeds``.
    """
    seeds, indices = seeds[:, None], indices.long()[:, None]  # [B, 1]
    groups = torch.arange((size + 3) // 4, device=seeds.device)[None]  # [1, ceil(size / 4)]
    none = torch.zeros_like(seeds)
    words = philox((groups, indices & _MASK, none + int(stream), none), (seeds & _MASK, (seeds >> _HALF) & _MASK))
    out = torch.empty(*words[0].shape, 4, device=seeds.device, dtype=torch.float32)
    for number, word in enumerate(words):
        out[..., number] = word.bitwise_right_shift_(9)
    return out.add_(0.5).mul_(2**-23).flatten(1)[:, :size]  # 23.5 bits fit exactly into a float32


def gumbel(seeds: torch.Tensor, indices: torch.Tensor, stream: Stream, size: int) -> torch.Tensor:
    """Standard Gumbel noise, float32 [B, size], made from ``uniform`` with the same arguments.

    ``argmax(logits + gumbel)`` samples from ``softmax(logits)`` (the Gumbel-max trick). Values lie between -2.9 and
    16.7, so a token about 19.4 nats (a factor of 3e8) below the most likely one is never sampled.
    """
    # exercise 02x4: uniform numbers to Gumbel noise
    # hint: the inverse of the cumulative distribution function exp(-exp(-x))
    return uniform(seeds, indices, stream, size).log_().neg_().log_().neg_()
    # end exercise
