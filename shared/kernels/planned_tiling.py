"""How the planned kernels cut their work: plain tables. Introduced in phase 6.1.

The best cut depends on chip and shape and shows only under a CUDA graph, so nothing is chosen at run time: a tiling
follows from the shapes and from the batch, the largest one that a captured launch serves. Any of them gives the same
results to a rounding. Invariant: what a decode tiling has on its way, ``num_stages`` tiles of keys and values, fits
``PIPELINE_BYTES``; where the table asks for more, the pipeline is shortened, then the tile.
"""

from dataclasses import dataclass, replace

import torch

from shared.attention.descriptor import Grid
from shared.kernels import paged_prefill
from shared.kernels.launch import next_power_of_two, num_multiprocessors

PIPELINE_BYTES = 96 * 1024  # what a program may have on its way, on the smallest GPUs too


@dataclass(frozen=True)
class DecodeTiling:
    """How decode is cut: keys a tile, what a program has on its way, and what is resident together."""

    tile: int
    num_warps: int = 4
    num_stages: int = 3
    programs_per_multiprocessor: int = 2
    least_split: int = 128  # tokens; a shorter split is not worth a program
    is_arrival: bool = True  # whether the last program to arrive merges, else a launch of its own
    merged_numbers: int = 4096  # fp32 numbers of states that the merging program holds at a time

    def grid(self, num_kv_heads: int, device: torch.device) -> Grid:
        """What the plan has to fill."""
        programs = self.programs_per_multiprocessor * num_multiprocessors(device)
        return Grid(max(1, programs // num_kv_heads), self.tile, max(self.least_split, self.tile))


@dataclass(frozen=True)
class PrefillTiling:
    """How prefill is cut: rows of queries (token × group) and keys a tile."""

    rows: int
    tile: int
    num_warps: int
    num_stages: int
    programs_per_multiprocessor: int = 2
    least_split: int = 128

    def tokens(self, group: int) -> int:
        """New tokens a tile: whole tokens, so that all heads of one have their keys cut alike."""
        return self.rows // group

    def grid(self, num_kv_heads: int, device: torch.device) -> Grid:
        """What the plan has to fill."""
        programs = self.programs_per_multiprocessor * num_multiprocessors(device)
        return Grid(max(1, programs // num_kv_heads), self.tile, max(self.least_split, self.tile))


FEW_PAIRS = 64
"""(sequence, key head) pairs of a batch up to which the first of two tilings holds: splits are short then, down to
``least_split``, and of a split that is a single tile nothing is loaded ahead."""
DECODE_TILINGS: dict[int, tuple[DecodeTiling, DecodeTiling]] = {  # by head size: few pairs, many
    16: (DecodeTiling(64), DecodeTiling(128)),
    32: (DecodeTiling(64), DecodeTiling(128)),
    64: (DecodeTiling(64), DecodeTiling(128)),
    128: (DecodeTiling(64), DecodeTiling(32)),
    256: (DecodeTiling(32), DecodeTiling(32)),
}


def decode_tiling(num_sequences: int, num_kv_heads: int, head_dim: int, itemsize: int) -> DecodeTiling:
    """The tiling for batches of up to ``num_sequences``, keys of ``itemsize`` bytes a number."""
    few, many = DECODE_TILINGS[head_dim]
    tiling = few if num_sequences * num_kv_heads <= FEW_PAIRS else many
    return fitted(tiling, head_dim, itemsize)


def fitted(tiling: DecodeTiling, head_dim: int, itemsize: int) -> DecodeTiling:
    """The tiling with as short a pipeline, and then as small a tile, as ``PIPELINE_BYTES`` asks for."""
    tile, stages = tiling.tile, tiling.num_stages
    token_bytes = 2 * head_dim * itemsize
    while stages > 2 and stages * tile * token_bytes > PIPELINE_BYTES:
        stages -= 1
    while tile > 16 and stages * tile * token_bytes > PIPELINE_BYTES:
        tile //= 2
    return replace(tiling, tile=tile, num_stages=stages)


def prefill_tiling(
    num_new_tokens: int, num_sequences: int, num_heads: int, num_kv_heads: int, head_dim: int, itemsize: int
) -> PrefillTiling:
    """The tiling for a ragged batch of so many new tokens in all: phase 6's tile, of whole tokens."""
    group = num_heads // num_kv_heads
    cut = paged_prefill.prefill_tiling(num_new_tokens * group, num_sequences, head_dim, itemsize)
    return PrefillTiling(max(cut.rows, next_power_of_two(group)), cut.tile, cut.num_warps, cut.num_stages)


def max_states(
    num_sequences: int, num_heads: int, num_kv_heads: int, head_dim: int, itemsize: int, device: torch.device
) -> int:
    """The most states of any plan that these tables lead to, for up to ``num_sequences`` sequences.

    It does not grow with the tokens of a step: fewer tiles than programs are ever cut (``Grid.max_states``).
    """
    about = (num_heads, num_kv_heads, head_dim, itemsize)
    decode = [decode_tiling(count, *about[1:]) for count in (1, num_sequences)]
    prefill = [prefill_tiling(1 << n, 1, *about) for n in range(11)]  # by the new tokens of a sequence
    group = num_heads // num_kv_heads
    return max(
        *(tiling.grid(num_kv_heads, device).max_states() for tiling in decode),
        *(tiling.grid(num_kv_heads, device).max_states(tiling.tokens(group)) for tiling in prefill),
    )
