"""The layout of a compressed KV cache: the cells of each head's kept tokens. Introduced in phase 9.2.

Heads keep different numbers of tokens, so the usual layout of one slot per token across all layers and heads no longer
works. Each slot is therefore divided into *cells*, one for each layer and KV head, and the kept tokens of all layers
and heads are stored end to end in the cells of the request's first blocks, head after head, in time order. Later tokens
are written as usual, one per slot, in the following blocks: the *tail*.

Invariants: the packed part occupies whole blocks, the last perhaps partly filled, so the tail begins in a new block;
lengths are physical (slots), positions remain the request's.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Self, cast

import numpy as np

from shared.cache.layout.paged import PagedLayout, PagedSizes
from shared.cache.layout.slots import Integers
from shared.cache.pool.blocks import Blocks
from shared.models.config import ModelConfig


@dataclass(frozen=True)
class Packed:
    """What a request's last compression kept of its first ``num_tokens`` tokens."""

    counts: Integers  # [layers, Hkv], kept tokens
    num_tokens: int
    num_slots: int  # slots of the packed part, a multiple of the block size; 0 if tokens are masked and not moved

    @cached_property
    def total(self) -> int:
        """Kept tokens over all heads."""
        return int(self.counts.sum())

    @cached_property
    def most(self) -> int:
        """Kept tokens of the head that keeps the most."""
        return int(self.counts.max())


@dataclass(frozen=True)
class Holding:
    """The tokens of one sequence: ``length`` slots in the blocks ``table``, the first of which may be packed."""

    row: int
    table: Blocks
    length: int
    packed: Packed | None

    @property
    def num_packed_slots(self) -> int:
        """Slots of the packed part."""
        return 0 if self.packed is None else self.packed.num_slots

    @property
    def num_tail(self) -> int:
        """Tokens since the last compression; every head keeps all of them."""
        if self.packed is None:
            return self.length
        return self.length - (self.packed.num_slots or self.packed.num_tokens)

    @property
    def num_tokens(self) -> int:
        """Tokens of the sequence, kept or not."""
        return self.num_tail + (0 if self.packed is None else self.packed.num_tokens)


@dataclass(frozen=True)
class LayoutPacked:
    """The packed parts of a layout's sequences; see :class:`shared.cache.layout.paged.LayoutExtra`."""

    packed: tuple[Packed | None, ...]  # [B]

    def part(self, layout: PagedLayout, sequences: slice) -> PagedLayout:
        return replace(layout, extra=LayoutPacked(self.packed[sequences]))


def packed_of(layout: PagedLayout) -> tuple[Packed | None, ...]:
    """The packed part of each sequence in a layout of ``CompressedRequests``."""
    return cast(LayoutPacked, layout.extra).packed


def holdings_of(layout: PagedLayout) -> list[Holding]:
    """The tokens of each sequence after the step."""
    rows, lengths, starts = layout.rows.tolist(), layout.lengths.tolist(), layout.table_starts.tolist()
    tables = [layout.tables[start:end] for start, end in pairwise(starts)]
    return [Holding(*one) for one in zip(rows, tables, lengths, packed_of(layout), strict=True)]


@dataclass(frozen=True)
class Cells:
    """The cells of a memory ``[layers, blocks, block_size, Hkv, D]``, numbered in that order."""

    num_layers: int
    num_blocks: int
    block_size: int
    num_kv_heads: int

    @classmethod
    def of(cls, config: ModelConfig, sizes: PagedSizes) -> Self:
        """The cells of a model's KV cache."""
        return cls(config.num_layers, sizes.num_blocks, sizes.block_size, config.num_kv_heads)

    @property
    def per_block(self) -> int:
        """Cells per block, in all layers."""
        return self.num_layers * self.block_size * self.num_kv_heads

    def slots_for(self, counts: Integers) -> int:
        """Slots of the whole blocks that ``counts`` [layers, Hkv] kept tokens fill."""
        return -(-int(counts.sum()) // self.per_block) * self.block_size

    def packed(self, numbers: Integers, table: Blocks) -> Integers:
        """Cells of the packed tokens with these indices, counted from the first, in a request's blocks."""
        # exercise 09.2x4: where a packed token is
        # hint: a block has per_block cells: the first per_block packed tokens fill the request's first block, table[0]
        # hint: inside a block they fill one layer's cells after another: block_size * num_kv_heads for each layer
        # hint: cells are numbered by layer, then by block, then by cell: (layer * num_blocks + block) * cells + cell
        # hint: tables are int32; convert the blocks to int64 before you multiply
        cells = self.block_size * self.num_kv_heads
        planes, cell = np.divmod(numbers, cells)
        entries, layers = np.divmod(planes, self.num_layers)
        return (layers * self.num_blocks + table[entries].astype(np.int64)) * cells + cell
        # end exercise

    def plain(self, layer: int | Integers, slots: Integers, table: Blocks) -> Integers:
        """Cells [Hkv, n] of n slots that hold one token each; for layers [L, 1, 1], those of all layers, [L, Hkv,
        n]."""
        blocks = table[slots // self.block_size].astype(np.int64)
        rows = (layer * self.num_blocks + blocks) * self.block_size + slots % self.block_size
        return rows * self.num_kv_heads + np.arange(self.num_kv_heads)[:, None]
