"""The tilings of the planned kernels: plain tables. Introduced in phase 6.1.

The fastest tiling depends on the GPU and the shape, and can only be measured under a CUDA graph. So nothing is tuned at
run time: a tiling follows from the shapes and from the largest batch that a captured launch serves. All tilings give
the same results up to rounding. Invariant: the loads that a program of a decode tiling keeps in flight (``num_stages``
tiles of keys and values) fit in ``PIPELINE_BYTES``, and those of the programs that a plan counts on fit in a
multiprocessor. If the table's entry exceeds the former, the pipeline is shortened first, then the tile.
"""

from bisect import bisect_left
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple, TypeVar

import torch

from shared.attention.descriptor import Grid
from shared.kernels.attention import paged_prefill
from shared.kernels.gluon import HAS_GLUON
from shared.kernels.launch import generation, next_power_of_two, num_multiprocessors

PIPELINE_BYTES = 96 * 1024  # bytes of loads in flight per program, for the smallest GPUs too


@dataclass(frozen=True)
class DecodeTiling:
    """The tiling of decode: keys per tile, loads in flight, and resident programs."""

    tile: int
    num_warps: int = 4
    num_stages: int = 3
    programs_per_multiprocessor: int = 2
    least_split: int = 128  # tokens; a shorter split is not worth a program
    is_arrival: bool = True  # whether the last program to arrive merges; otherwise a second launch does
    merged_numbers: int = 4096  # fp32 numbers of states that the merging program holds at a time
    pipeline_bytes: int = 0  # of a program's loads in flight, if :func:`fitted` knows them

    def grid(self, num_kv_heads: int, device: torch.device) -> Grid:
        """The launch grid that a plan fills."""
        per_multiprocessor = self.programs_per_multiprocessor
        if self.pipeline_bytes:
            per_multiprocessor = min(per_multiprocessor, generation(device).shared_bytes // self.pipeline_bytes)
        programs = per_multiprocessor * num_multiprocessors(device)
        return Grid(max(1, programs // num_kv_heads), self.tile, max(self.least_split, self.tile))


class CopiedTiling(NamedTuple):
    """The tiling of prefill for keys that are copied into a contiguous matrix
    (:mod:`shared.kernels.attention.prompt_keys`)."""

    tile: int
    num_warps: int
    num_stages: int
    is_specialized: bool = False  # whether groups of warps have a task each, and these groups have ``num_warps``
    takes_turns: bool = False  # whether those that attend take turns with the tensor cores


@dataclass(frozen=True)
class PrefillTiling:
    """The tiling of prefill: rows of queries (token × group) and keys per tile."""

    rows: int
    tile: int
    num_warps: int
    num_stages: int
    programs_per_multiprocessor: int = 2
    least_split: int = 128
    copied: CopiedTiling | None = None  # the tiling for keys that are copied first; None: they are read from the blocks

    def tokens(self, group: int) -> int:
        """New tokens per tile: whole tokens, so that all heads of a token have the same splits."""
        return self.rows // group

    @property
    def unit(self) -> int:
        """A split is a multiple of this many tokens, which are whole tiles of keys in both kernels."""
        return self.tile if self.copied is None else max(self.tile, self.copied.tile)

    def grid(self, num_kv_heads: int, device: torch.device) -> Grid:
        """The launch grid that a plan fills."""
        programs = self.programs_per_multiprocessor * num_multiprocessors(device)
        return Grid(max(1, programs // num_kv_heads), self.unit, max(self.least_split, self.unit))


AnyTiling = TypeVar("AnyTiling", bound=DecodeTiling)
PAIRS = (16, 512)
"""Maximum (sequence, KV head) pairs of a batch for the first tiling and for the second. In a small batch, a pair has
many splits, whose states take time to merge: half as many programs. In a large one, its loop is long, so tiles are
larger; with heads of 64 a program has one warp instead, and many programs begin and end while others load."""
DECODE_TILINGS: dict[int, tuple[DecodeTiling, ...]] = {  # by head size, then by pairs
    16: (DecodeTiling(64), DecodeTiling(128), DecodeTiling(128)),
    32: (DecodeTiling(64), DecodeTiling(128), DecodeTiling(128)),
    64: (DecodeTiling(64, 2, 3, 2, 64), DecodeTiling(64, 2, 3, 4, 64), DecodeTiling(32, 1, 3, 4, 64)),
    128: (DecodeTiling(32, 2, 3, 2, 32), DecodeTiling(32, 2, 3, 4, 32), DecodeTiling(64, 4, 3, 2, 128)),
    256: (DecodeTiling(32, 4, 3, 2, 32), DecodeTiling(16, 2, 3, 4, 32), DecodeTiling(16, 2, 3, 4, 32)),
}
"""The larger a head, the fewer keys in a tile. From heads of 64 on, a multiprocessor has 192 KB in flight, or with few
pairs and heads of 64 or 128 half of that: an H200 needs as much to reach its bandwidth."""

LEAST_COPIED = 256
"""Minimum new tokens of a step for the keys of prompts to be copied; fewer are drafts to verify, or the end of a
prompt."""
LEAST_ROWS = 64
"""Rows of an average sequence above which the keys of a step are copied: tiles of fewer rows do not read them often
enough."""
COPIED_ROWS = 128
"""Rows of queries in a tile of a step whose keys are copied, for every head size."""
COPIED_TILINGS = {  # by head size; an entry covers sizes up to its own
    64: CopiedTiling(64, 4, 3),
    128: CopiedTiling(64, 8, 3),
    256: CopiedTiling(64, 8, 2),
}
SPECIALIZED_TILINGS = {  # of :mod:`shared.kernels.attention.specialized_prefill`, by head size
    64: CopiedTiling(128, 4, 2, is_specialized=True),
    128: CopiedTiling(128, 4, 2, is_specialized=True, takes_turns=True),
    256: CopiedTiling(64, 4, 2, is_specialized=True),
}
LEAST_SPECIALIZED = {64: 3072}
"""Minimum new tokens of a step for specialized warps, by head size; in smaller steps Triton's kernel is faster."""


def decode_tiling(num_sequences: int, num_kv_heads: int, head_dim: int, itemsize: int) -> DecodeTiling:
    """The tiling of a batch of ``num_sequences``; keys have ``itemsize`` bytes per element."""
    tiling = DECODE_TILINGS[head_dim][bisect_left(PAIRS, num_sequences * num_kv_heads)]
    if itemsize == 1 and tiling.num_warps > 1:  # as many bytes in a tile; a program of one warp is faster with few keys
        tiling = replace(tiling, tile=min(64, 2 * tiling.tile))
    return fitted(tiling, head_dim, itemsize)


def decode_tilings(num_sequences: int, num_kv_heads: int, head_dim: int, itemsize: int) -> list[DecodeTiling]:
    """The tilings of all batches of up to ``num_sequences``."""
    counts = [min(num_sequences, max(1, pairs // num_kv_heads)) for pairs in PAIRS]
    return [decode_tiling(count, num_kv_heads, head_dim, itemsize) for count in (*counts, num_sequences)]


@cache  # called in every step
def fitted(tiling: AnyTiling, head_dim: int, itemsize: int) -> AnyTiling:
    """The tiling with its pipeline, and then its tile, reduced to fit in ``PIPELINE_BYTES``."""
    tile, stages = tiling.tile, tiling.num_stages
    token_bytes = 2 * head_dim * itemsize
    while stages > 2 and stages * tile * token_bytes > PIPELINE_BYTES:
        stages -= 1
    while tile > 16 and stages * tile * token_bytes > PIPELINE_BYTES:
        tile //= 2
    return replace(tiling, tile=tile, num_stages=stages, pipeline_bytes=stages * tile * token_bytes)


def prefill_tiling(
    num_new_tokens: int,
    num_sequences: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    itemsize: int,
    can_copy: bool = False,
    can_specialize: bool = False,
) -> PrefillTiling:
    """The tiling for a ragged batch with this total of new tokens: phase 6's tile, rounded to whole tokens.

    Args:
        can_copy: whether keys may be copied first (:mod:`shared.kernels.attention.prompt_keys`).
        can_specialize: whether copied keys may be attended to by specialized warps.
    """
    group = num_heads // num_kv_heads
    cut = paged_prefill.prefill_tiling(num_new_tokens * group, num_sequences, head_dim, itemsize)
    rows = max(cut.rows, next_power_of_two(group))
    if not can_copy or num_new_tokens < LEAST_COPIED or num_new_tokens * group <= LEAST_ROWS * num_sequences:
        return PrefillTiling(rows, cut.tile, cut.num_warps, cut.num_stages)
    copied = COPIED_TILINGS[max(64, head_dim)]
    if can_specialize and num_new_tokens >= LEAST_SPECIALIZED.get(head_dim, 0):
        copied = SPECIALIZED_TILINGS.get(head_dim, copied)
    return PrefillTiling(max(rows, COPIED_ROWS), cut.tile, copied.num_warps, cut.num_stages, copied=copied)


def can_copy(itemsize: int, device: torch.device) -> bool:
    """Whether copied keys are faster depends on the GPU's copy engine and shared memory; fp32 uses no tensor cores."""
    return itemsize <= 2 and device.type == "cuda" and generation(device).copies_tiles


def can_specialize(group: int, itemsize: int, softcap: float | None, device: torch.device) -> bool:
    """Whether copied keys may be attended to by specialized warps.

    Args:
        group: the query heads of a KV head; a tile of them must be a power of two.
        softcap: the model's cap of its scores, which these warps do not know.
    """
    is_known = itemsize == 2 and softcap is None and group == next_power_of_two(group) <= COPIED_ROWS
    return is_known and HAS_GLUON and device.type == "cuda" and generation(device).has_warpgroups


def max_states(
    num_sequences: int, num_heads: int, num_kv_heads: int, head_dim: int, itemsize: int, device: torch.device
) -> int:
    """Maximum number of states of any plan with these tables, for up to ``num_sequences`` sequences.

    It does not grow with the tokens of a step: fewer tiles than programs are ever split (``Grid.max_states``).
    """
    about = (num_heads, num_kv_heads, head_dim, itemsize)
    decode = decode_tilings(num_sequences, *about[1:])
    prefill = [prefill_tiling(1 << n, 1, *about, can_copy) for n in range(11) for can_copy in (False, True)]
    group = num_heads // num_kv_heads
    return max(
        *(tiling.grid(num_kv_heads, device).max_states() for tiling in decode),
        *(tiling.grid(num_kv_heads, device).max_states(tiling.tokens(group)) for tiling in prefill),
    )
