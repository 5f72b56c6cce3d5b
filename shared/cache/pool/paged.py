"""A paged KV cache pool: each request holds the blocks that it fills. The host side. Introduced in phase 6.

A contiguous region holds the longest possible sequence, and a short request wastes most of it. Here a request
holds blocks, which need not be adjacent, and its block table maps tokens to blocks: token t is at offset
``t % block_size`` of block ``table[t // block_size]``. A request wastes less than one block
(PagedAttention: Kwon et al., SOSP 2023, arXiv 2309.06180).

An *extension* (:mod:`shared.cache.pool.extension`) may use blocks in other ways: a prefix tree (phase 8), segments
(9.1), compressed requests (9.2). The view's ``lay_out`` adds what its attention needs.

Invariants: a request holds exactly the blocks that its reserved tokens fill, and the allocator counts a reference for
each table that lists a block; the first ``length`` slots of a table hold the request's tokens in order.
"""

import math
from collections.abc import Callable, Iterable
from typing import Self

import numpy as np

from shared.cache.layout.paged import PagedLayout, PagedSizes, as_it_is
from shared.cache.layout.slots import before_and_after
from shared.cache.pool.blocks import BlockAllocator, Blocks
from shared.cache.pool.extension import NoExtension, PoolExtension
from shared.engine.request import Request
from shared.errors import CapacityError, ConfigError
from shared.scheduling.schedule import Schedule

WATERMARK = 0.01
"""Share of the blocks that admission leaves free for running requests to grow into, as in vLLM."""


class PagedKVCachePool:
    """Blocks for up to ``max_sequences`` requests at a time; see ``CachePoolProtocol``.

    Args:
        num_blocks: blocks of ``block_size`` tokens each.
        request_capacity: maximum tokens of one request; None: the whole pool, which is also the upper limit.
        lay_out: completes the layout of a step, for the view's attention.

    Raises ConfigError if an argument is not positive.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        max_sequences: int,
        request_capacity: int | None = None,
        extension: PoolExtension | None = None,
        lay_out: Callable[[PagedLayout], PagedLayout] = as_it_is,
    ) -> None:
        if min(num_blocks, block_size, max_sequences) < 1:
            raise ConfigError(
                f"The pool has {num_blocks} blocks of {block_size} tokens for {max_sequences} sequences; it needs at "
                "least 1 of each."
            )
        self.block_size = block_size
        self.max_sequences = max_sequences
        self.capacity_tokens = num_blocks * block_size
        self.watermark_tokens = math.ceil(WATERMARK * num_blocks) * block_size
        self.request_capacity = min(request_capacity or self.capacity_tokens, self.capacity_tokens)
        self.allocator = BlockAllocator(num_blocks)
        self.rows: dict[Request, int] = {}  # each request's row in the arrays below
        self.free_rows = list(range(max_sequences))[::-1]
        self.tables: Blocks = np.zeros((max_sequences, self.blocks_for(self.request_capacity)), np.int32)
        self.num_held = [0] * max_sequences  # blocks: the number of valid entries in each row of the tables
        self.granted = [0] * max_sequences  # tokens
        self.lengths = [0] * max_sequences
        self.num_slotless: dict[Request, int] = {}  # tokens without a slot in the request's table, if there are any
        self.laid_out: tuple[int, list[int], PagedLayout] | None = None
        """The number of the newest step's run, its rows and its layout; None once a block is full or tokens move."""
        self.extension = extension or NoExtension()
        self.lay_out = lay_out

    @classmethod
    def of(
        cls,
        sizes: PagedSizes,
        extension: PoolExtension | None = None,
        lay_out: Callable[[PagedLayout], PagedLayout] = as_it_is,
    ) -> Self:
        """A pool with the sizes of its view."""
        shape = (sizes.num_blocks, sizes.block_size, sizes.max_sequences, sizes.max_seq_len)
        return cls(*shape, extension, lay_out)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that ``num_tokens`` tokens of one request fill."""
        return -(-num_tokens // self.block_size)

    def admit(self, request: Request) -> int:
        return self.extension.admit(self, request)

    def must_wait(self, request: Request) -> bool:
        return self.extension.must_wait(request)

    def reserve(self, request: Request, num_tokens: int) -> bool:
        """Allocates the missing blocks, all of them or none."""
        num_slotless = self.num_slotless.get(request, 0)
        if not 0 <= num_tokens <= self.request_capacity + num_slotless:
            raise CapacityError(
                f"Request {request.request_id} asks for {num_tokens} tokens and the pool has {self.request_capacity} "
                "for one request; shorten the prompt, lower max_new_tokens, or raise max_seq_len or num_gpu_blocks."
            )
        num_tokens = max(0, num_tokens - num_slotless)
        # exercise 06x2: grow a block table
        # hint: a request that holds blocks has a row of the tables; num_held counts the valid entries of the row
        # hint: a new request needs a row from free_rows; if none is free, return False and change nothing
        # hint: blocks_for returns how many blocks it needs in all: allocate those that are missing
        # hint: allocate returns None if it cannot provide all of them; take a row only after it has succeeded
        # hint: append the new blocks to the table; granted never shrinks: a smaller num_tokens frees nothing
        row = self.rows.get(request)
        held = 0 if row is None else self.num_held[row]
        if row is None or num_tokens > held * self.block_size:
            if row is None and not self.free_rows:
                return False
            blocks = self.allocate(self.blocks_for(num_tokens) - held)
            if blocks is None:
                return False
            if row is None:
                row = self.rows[request] = self.free_rows.pop()
            self.tables[row, held : held + len(blocks)] = blocks
            self.num_held[row] += len(blocks)
        self.granted[row] = max(self.granted[row], num_tokens)
        return True
        # end exercise

    def allocate(self, count: int) -> Blocks | None:
        """``count`` blocks, each with one reference; None if there are fewer."""
        return self.extension.allocate(self, count)

    def commit(self, request: Request, num_tokens: int) -> None:
        row = self._row(request)
        length = self.lengths[row] + num_tokens
        if num_tokens < 0 or length > self.granted[row]:
            raise CapacityError(
                f"Request {request.request_id} has {self.lengths[row]} of {self.granted[row]} reserved tokens and "
                f"cannot have {num_tokens} more; reserve them first."
            )
        self.lengths[row] = length
        self.laid_out = None  # an extension may replace the block that has been filled
        self.extension.commit(self, request, num_tokens)

    def reserve_next(self, requests: Iterable[Request]) -> list[Request]:
        """All blocks that the step needs are allocated at once, or none of them."""
        rows, granted, num_held, size = self.rows, self.granted, self.num_held, self.block_size
        slotless = self.num_slotless
        others: list[Request] = []
        for request in requests:
            row, num_tokens = rows[request], request.num_tokens + request.num_pending_tokens
            if slotless:
                num_tokens -= slotless.get(request, 0)
            if num_tokens > num_held[row] * size:
                others.append(request)
            elif num_tokens > granted[row]:
                granted[row] = num_tokens
        if not others:
            return []
        blocks = self.allocate(len(others))
        if blocks is None:
            return others
        growing = [rows[request] for request in others]
        self.tables[growing, [num_held[row] for row in growing]] = blocks
        for row in growing:
            granted[row] = num_held[row] * size + 1
            num_held[row] += 1
        return []

    def commit_next(self, requests: Iterable[Request]) -> None:
        """``commit`` handles blocks that have become full."""
        rows, lengths, granted, size = self.rows, self.lengths, self.granted, self.block_size
        for request in requests:
            row = rows.get(request)
            if row is None:
                raise self._no_row(request)
            length = lengths[row] + 1
            if length % size and length <= granted[row]:
                lengths[row] = length
            else:
                self.commit(request, 1)

    def truncate(self, request: Request, num_tokens: int) -> None:
        self.extension.check_truncation(request, num_tokens)
        row = self._row(request)
        num_tokens -= self.num_slotless.get(request, 0)
        if not 0 <= num_tokens <= self.lengths[row]:
            raise CapacityError(
                f"Request {request.request_id} has {self.lengths[row]} cached tokens and cannot be truncated to "
                f"{num_tokens}."
            )
        self.lengths[row], self.laid_out = num_tokens, None

    def shrink(self, request: Request, num_tokens: int) -> None:
        """Frees the blocks that are no longer needed."""
        row = self._row(request)
        num_tokens -= self.num_slotless.get(request, 0)
        self.granted[row] = max(self.lengths[row], min(num_tokens, self.granted[row]))
        needed = self.blocks_for(self.granted[row])
        if needed < self.num_held[row]:
            self.allocator.free(self.tables[row, needed : self.num_held[row]])
            self.num_held[row] = needed

    def release(self, request: Request) -> None:
        self.extension.release(request)
        self.num_slotless.pop(request, None)
        row = self.rows.get(request)
        if row is None:
            return
        self.allocator.free(self.tables[row, : self.num_held[row]])
        del self.rows[request]
        self.num_held[row] = self.granted[row] = self.lengths[row] = 0
        self.free_rows.append(row)

    def length(self, request: Request) -> int:
        row = self.rows.get(request)
        return self.extension.context_length(request) + (0 if row is None else self.lengths[row])

    @property
    def used_tokens(self) -> int:
        """A token of a shared block counts once."""
        return sum(self.lengths) + self.extension.used_tokens()

    @property
    def free_tokens(self) -> int:
        """Free slots in partially filled blocks do not count; kept blocks do."""
        return (self.allocator.num_free + self.extension.num_unused_blocks()) * self.block_size

    def layout(self, schedule: Schedule) -> PagedLayout:
        run, last = schedule.run, self.laid_out
        if run is not None and last is not None and last[0] == run.number and (last[2].lengths % self.block_size).all():
            layout = last[2].next([self.granted[row] for row in last[1]])
            self.laid_out = run.number, last[1], layout
            return self.lay_out(self.extension.lay_out(self, schedule, layout))
        try:
            rows = [self.rows[request] for request in schedule.requests]
        except KeyError as error:
            raise self._no_row(error.args[0]) from None
        num_cached, lengths = before_and_after(schedule, rows, self.lengths, self.granted)
        layout = PagedLayout.of(np.array(rows, np.int64), num_cached, lengths, self.tables, self.block_size)
        if schedule.num_ahead:
            layout = layout.reaching(schedule.num_ahead, self.tables, self.block_size)
        can_follow = not (schedule.num_ahead or self.num_slotless)
        self.laid_out = (run.number, rows, layout) if run is not None and can_follow else None
        return self.lay_out(self.extension.lay_out(self, schedule, layout))

    def holdings(self) -> tuple[int, dict[Request, list[int]]]:
        return self.block_size, {request: self.table(request).tolist() for request in self.rows}

    def cached_blocks(self) -> list[int]:
        return self.extension.unused_blocks()

    def drop_cached(self) -> None:
        self.extension.drop_unused(self)

    def table(self, request: Request) -> Blocks:
        """The block table of a request; empty if it holds no blocks."""
        row = self.rows.get(request)
        return self.tables[0, :0] if row is None else self.tables[row, : self.num_held[row]].copy()

    def audit(self) -> list[str]:
        found = [
            f"Request {request.request_id} holds {self.num_held[row]} blocks with {self.lengths[row]} tokens of "
            f"{self.granted[row]} reserved."
            for request, row in self.rows.items()
        ]
        found += self.audit_blocks()
        if sorted([*self.rows.values(), *self.free_rows]) != list(range(self.max_sequences)):
            held = sorted(self.rows.values())
            found.append(f"Of {self.max_sequences} rows {held} are in use and {self.free_rows} free.")
        found += [
            f"Row {row} is free and has {self.lengths[row]} tokens of {self.granted[row]} reserved."
            for row in self.free_rows
            if self.lengths[row] or self.granted[row] or self.num_held[row]
        ]
        found += [
            f"Request {request.request_id} has {self.lengths[row]} tokens and {self.granted[row]} are reserved."
            for request, row in self.rows.items()
            if self.lengths[row] > self.granted[row]
        ]
        return found

    def audit_blocks(self) -> list[str]:
        """Check blocks and block tables; returns one message per violation. Held blocks are not a violation."""
        found = [
            f"Request {request.request_id} holds {self.num_held[row]} blocks and its {self.granted[row]} reserved "
            f"tokens fill {self.blocks_for(self.granted[row])}."
            for request, row in self.rows.items()
            if self.num_held[row] != self.blocks_for(self.granted[row])
        ]
        holders = [*map(self.table, self.rows), *self.extension.block_lists()]
        return found + self.allocator.audit(holders) + self.extension.audit(self)

    def _row(self, request: Request) -> int:
        row = self.rows.get(request)
        if row is None:
            raise self._no_row(request)
        return row

    def _no_row(self, request: Request) -> CapacityError:
        return CapacityError(f"Request {request.request_id} holds no blocks; reserve some first.")
