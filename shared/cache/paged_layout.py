"""Where the tokens of a batch stand in blocks. Introduced in phase 6.

Beside the slot of each new token, what attention reads is said by block tables. They travel end to end, so a step sends
the blocks that are read and not the widest table times the batch. Invariant: a table here is a copy, and does not
change when the pool goes on.
"""

from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from shared.cache.blocks import Blocks
from shared.cache.layout import Integers, Layout, ranges


@dataclass(frozen=True)
class PagedSizes:
    """The most that both sides ever see: blocks, sequences, new tokens of a step, tokens of a sequence."""

    num_blocks: int
    block_size: int
    max_sequences: int
    max_tokens: int
    max_seq_len: int


@dataclass(frozen=True)
class PagedLayout(Layout):
    """The places of a batch in memory of blocks."""

    tables: Blocks  # the blocks of each sequence that the step reads or writes, end to end
    table_starts: Integers  # [B + 1], where each sequence's blocks begin, and where the last one's end

    @classmethod
    def of(cls, rows: Integers, num_cached: Integers, lengths: Integers, tables: Blocks, block_size: int) -> Self:
        """The layout of sequences whose blocks are the first entries of their row of ``tables [rows, width]``."""
        num_new = lengths - num_cached
        places = ranges(num_cached, num_new)  # [T], of each new token in its sequence
        token_rows = rows.repeat(num_new)  # [T]
        # exercise 06x5: look it up in the block table
        # hint: the token at place t of its sequence stands in entry t // block_size of that sequence's table
        # hint: tables has a row for each sequence: index it with token_rows and with the entries, both [T]
        # hint: within its block it stands at place t % block_size; block b begins at slot b * block_size
        # hint: tables are int32; make the blocks int64 before you multiply
        blocks = tables[token_rows, places // block_size].astype(np.int64)
        slot_mapping = blocks * block_size + places % block_size  # [T]
        # end exercise
        num_blocks = -(-lengths // block_size)
        entries = ranges(rows * tables.shape[1], num_blocks)  # of all tables, end to end
        table_starts = np.zeros(len(rows) + 1, np.int64)
        num_blocks.cumsum(out=table_starts[1:])
        return cls(rows, num_cached, lengths, slot_mapping, tables.reshape(-1)[entries], table_starts)

    def part(self, sequences: slice, tokens: slice) -> Self:
        """See :class:`Layout`."""
        starts = self.table_starts[sequences.start : sequences.stop + 1]
        return replace(
            self,
            rows=self.rows[sequences],
            num_cached=self.num_cached[sequences],
            lengths=self.lengths[sequences],
            slot_mapping=self.slot_mapping[tokens],
            tables=self.tables[starts[0] : starts[-1]],
            table_starts=starts - starts[0],
        )
