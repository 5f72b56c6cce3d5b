"""The slots and block tables of a batch. Introduced in phase 6.

Besides the slot of each new token, attention needs the block table of each sequence. The tables are concatenated, so a
step uploads only the entries that are read, not the widest table times the batch. Invariant: the tables are copies and
do not change with the pool.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, Self

import numpy as np

from shared.cache.layout.slots import Integers, Layout, check_reserved, ranges
from shared.cache.pool.blocks import Blocks


@dataclass(frozen=True)
class PagedSizes:
    """The limits that pool and view share: blocks, sequences, new tokens of a step, tokens of a sequence."""

    num_blocks: int
    block_size: int
    max_sequences: int
    max_tokens: int
    max_seq_len: int


class LayoutExtra(Protocol):
    """What a later phase adds to the layout of a step: plans (6.1), ranges of segments (9.1), packed parts (9.2)."""

    def part(self, layout: "PagedLayout", sequences: slice) -> "PagedLayout":
        """The layout of a range of sequences, with its extras."""
        ...


@dataclass(frozen=True)
class PagedLayout(Layout):
    """The layout of a batch in a paged KV cache."""

    tables: Blocks  # the blocks of each sequence that the step reads or writes, concatenated
    table_starts: Integers  # [B + 1], offsets of the sequences in ``tables``, as in CSR
    copies: Blocks = field(default_factory=lambda: np.zeros((0, 2), np.int32), kw_only=True)
    """[c, 2], blocks that are copied before the step, each as (from, to); none without a prefix tree."""
    extra: LayoutExtra | None = field(default=None, kw_only=True)

    @classmethod
    def of(cls, rows: Integers, num_cached: Integers, lengths: Integers, tables: Blocks, block_size: int) -> Self:
        """The layout of sequences whose block tables are the rows of ``tables [max_sequences, width]``."""
        num_new = lengths - num_cached
        indices = ranges(num_cached, num_new)  # [T], index of each new token in its sequence
        token_rows = rows.repeat(num_new)  # [T]
        # exercise 06x5: look up slots in the block table
        # hint: token t of a sequence is in the block at entry t // block_size of its block table
        # hint: tables has a row for each sequence: index it with token_rows and the entries, both [T]
        # hint: its offset in the block is t % block_size; block b begins at slot b * block_size
        # hint: tables are int32; convert the blocks to int64 before you multiply
        blocks = tables[token_rows, indices // block_size].astype(np.int64)
        slot_mapping = blocks * block_size + indices % block_size  # [T]
        # end exercise
        num_blocks = -(-lengths // block_size)
        entries = ranges(rows * tables.shape[1], num_blocks)  # flat indices into tables
        table_starts = np.zeros(len(rows) + 1, np.int64)
        num_blocks.cumsum(out=table_starts[1:])
        return cls(rows, num_cached, lengths, slot_mapping, tables.reshape(-1)[entries], table_starts)

    def next(self, granted: Sequence[int]) -> Self:
        """The layout of the next token of each sequence, if no sequence begins a block with it.

        ``granted``: the reserved tokens of each. Raises CapacityError if too few are reserved.
        """
        lengths = self.lengths + 1
        check_reserved(lengths, np.array(granted, np.int64))
        layout = type(self)(self.rows, self.lengths, lengths, self.slot_mapping + 1, self.tables, self.table_starts)
        vars(layout).update(num_new=self.num_new, num_decoding=self.num_decoding)
        return layout

    def with_extra(self, extra: LayoutExtra) -> Self:
        """The layout with what a later phase adds; it keeps what was derived from its arrays."""
        layout = object.__new__(type(self))
        vars(layout).update(vars(self), extra=extra)
        return layout

    def reaching(self, num_ahead: int, tables: Blocks, block_size: int) -> Self:
        """The layout with the blocks of ``num_ahead`` further tokens of each sequence; ``tables`` as for ``of``."""
        num_blocks = np.minimum(-(-(self.lengths + num_ahead) // block_size), tables.shape[1])
        read = tables.reshape(-1)[ranges(self.rows * tables.shape[1], num_blocks)]
        return replace(self, tables=read, table_starts=np.append(0, num_blocks.cumsum()), num_ahead=num_ahead)

    def part(self, sequences: slice, tokens: slice) -> "PagedLayout":
        starts = self.table_starts[sequences.start : sequences.stop + 1]
        tables = self.tables[starts[0] : starts[-1]]
        part = replace(
            self,
            rows=self.rows[sequences],
            num_cached=self.num_cached[sequences],
            lengths=self.lengths[sequences],
            slot_mapping=self.slot_mapping[tokens],
            tables=tables,
            table_starts=starts - starts[0],
            copies=self.copies[np.isin(self.copies[:, 1], tables)],
            extra=None,
        )
        return part if self.extra is None else self.extra.part(part, sequences)


def as_it_is(layout: PagedLayout) -> PagedLayout:
    """The layout of a step whose attention needs no plans."""
    return layout
