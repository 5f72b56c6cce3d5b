"""A paged KV cache pool whose requests may be compressed. The host side. Introduced in phase 9.2.

A compressed request holds fewer slots than it has tokens. Scheduler and request count tokens from the first, whatever
became of them; the pool subtracts what was saved. Blocks are whole blocks, as for every other request, so the allocator
and requests that are not compressed are as in phase 6.

Invariants: those of :class:`shared.cache.paged.PagedKVCachePool`, with slots for tokens; a compressed request wastes
less than one block of its packed part; compressing takes no block, and what was reserved and not written stays so.
"""

from collections.abc import Iterable

from shared.cache.blocks import Blocks
from shared.cache.condensed_layout import Cells, CondensedLayout, Holding, Packed
from shared.cache.paged import PagedKVCachePool
from shared.engine.request import Request
from shared.errors import CapacityError
from shared.scheduling.schedule import Schedule


class CondensedKVCachePool(PagedKVCachePool):
    """A paged pool with compressed requests; ``max_seq_len`` as ``request_capacity`` there."""

    def __init__(self, cells: Cells, max_sequences: int, max_seq_len: int) -> None:
        super().__init__(cells.num_blocks, cells.block_size, max_sequences, max_seq_len)
        self.cells = cells
        self.packed: dict[Request, Packed] = {}  # of the compressed requests

    def num_saved(self, request: Request) -> int:
        """Slots that a request lacks for one to a token."""
        packed = self.packed.get(request)
        return 0 if packed is None or packed.num_slots == 0 else packed.num_tokens - packed.num_slots

    def reserve(self, request: Request, num_tokens: int) -> bool:
        """See ``CachePoolProtocol``."""
        return super().reserve(request, num_tokens - self.num_saved(request))

    def reserve_next(self, requests: Iterable[Request]) -> list[Request]:
        """See ``CachePoolProtocol``; if a request is compressed, blocks are left to ``reserve``."""
        if not self.packed:
            return super().reserve_next(requests)
        others: list[Request] = []
        for request in requests:
            row, num_tokens = self.rows[request], request.num_tokens + request.num_pending_tokens
            num_slots = num_tokens - self.num_saved(request)
            if num_slots > self.num_held[row] * self.block_size:
                others.append(request)
            elif num_slots > self.granted[row]:
                self.granted[row] = num_slots
        return others

    def shrink(self, request: Request, num_tokens: int) -> None:
        """See ``CachePoolProtocol``."""
        super().shrink(request, num_tokens - self.num_saved(request))

    def truncate(self, request: Request, num_tokens: int) -> None:
        """See ``CachePoolProtocol``; raises CapacityError also for fewer tokens than were compressed."""
        packed = self.packed.get(request)
        if packed is not None and num_tokens < packed.num_tokens:
            raise CapacityError(
                f"Request {request.request_id} cannot be truncated to {num_tokens} tokens: of its first "
                f"{packed.num_tokens} some were dropped."
            )
        super().truncate(request, num_tokens - self.num_saved(request))

    def release(self, request: Request) -> None:
        """See ``CachePoolProtocol``."""
        self.packed.pop(request, None)
        super().release(request)

    def layout(self, schedule: Schedule) -> CondensedLayout:
        """See ``CachePoolProtocol``."""
        return CondensedLayout.of_paged(super().layout(schedule), [self.packed.get(r) for r in schedule.requests])

    def holding(self, request: Request, num_in_flight: int = 0) -> Holding:
        """See :class:`shared.cache.compressing.CompressingPool`."""
        row = self._row(request)
        length = self.lengths[row] + num_in_flight
        table: Blocks = self.tables[row, : self.blocks_for(length)].copy()
        return Holding(row, table, length, self.packed.get(request))

    def compress(self, request: Request, packed: Packed) -> int | None:
        """See :class:`shared.cache.compressing.CompressingPool`."""
        row = self._row(request)
        self.packed[request] = packed
        if not packed.num_slots:
            return 0
        reserved = self.granted[row] - self.lengths[row]
        self.lengths[row], self.granted[row] = packed.num_slots, packed.num_slots + reserved
        held, needed = self.num_held[row], self.blocks_for(self.granted[row])
        self.allocator.free(self.tables[row, needed:held])
        self.num_held[row] = needed
        return held - needed

    def fill(self, request: Request) -> tuple[int, int]:
        """The cells that a request's tokens fill, and those that it holds."""
        holding, per_slot = self.holding(request), self.cells.num_layers * self.cells.num_kv_heads
        packed = holding.packed
        num_packed = int(packed.counts.sum()) if packed is not None and packed.num_slots else 0
        filled = num_packed + (holding.length - holding.num_packed_slots) * per_slot
        return filled, self.num_held[holding.row] * self.cells.per_block

    def audit_blocks(self) -> list[str]:
        """See :class:`shared.cache.paged.PagedKVCachePool`; the packed parts too."""
        found = [
            f"Request {request.request_id} has a packed part of {packed.num_slots} slots and its "
            f"{int(packed.counts.sum())} kept tokens fill {self.cells.slots_for(packed.counts)}."
            for request, packed in self.packed.items()
            if packed.num_slots not in (0, self.cells.slots_for(packed.counts))
        ]
        found += [
            f"Request {request.request_id} is compressed and holds no blocks."
            for request in self.packed
            if request not in self.rows
        ]
        return found + super().audit_blocks()
