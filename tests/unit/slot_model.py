"""A naive model of a KV cache's memory: which token, after which tokens, was written to each slot."""

from collections.abc import Iterable
from itertools import accumulate

from shared.cache.pool.interface import CachePoolProtocol
from shared.engine.request import Request
from shared.scheduling.schedule import Schedule, Scheduled
from tests.unit.scheduling_loop import TokenAt

AFTER_SEGMENTS = -1
"""Stands before the tokens of a request that is made of segments: its keys know another past than its tokens say."""


class SlotModel:
    """Does what the device does: copies blocks, writes each sequence's new tokens, and lets it read all it may see.

    A token is known by its *chain*: a number for it and all tokens before it.
    """

    def __init__(self, pool: CachePoolProtocol, token_at: TokenAt) -> None:
        self.pool, self.token_at = pool, token_at
        self.target = getattr(pool, "target", pool)
        self.registry = getattr(getattr(self.target, "extension", None), "registry", None)
        self.chains: dict[tuple[int, int], int] = {}
        self.slots: dict[int, int] = {}
        self.num_shared = 0  # steps in which two sequences read the same segment

    def run(self, schedule: Schedule) -> int:
        """Returns the number of blocks that were copied."""
        if not schedule:
            return 0
        layout, size = self.pool.layout(schedule), self.target.block_size if hasattr(self.target, "rows") else 1
        copies = getattr(layout, "copies", None)
        copies = [] if copies is None else copies.tolist()
        for source, target in copies:
            for offset in range(size):
                self.slots[target * size + offset] = self.slots[source * size + offset]
        slots, chains = iter(layout.slot_mapping.tolist()), [self.chain_of(entry) for entry in schedule]
        for entry, chain in zip(schedule, chains, strict=True):
            for index in range(entry.start, entry.start + entry.num_tokens):
                self.slots[next(slots)] = chain[index]
        ranges = getattr(getattr(layout, "extra", None), "ranges", ())
        for sequence, (entry, chain) in enumerate(zip(schedule, chains, strict=True)):
            first = self.read_segments(entry.request, [one for one in ranges if one.sequence == sequence])
            places = self.places(entry.request, entry.start + entry.num_tokens - first)
            read = [self.slots.get(place) for place in places]
            name = entry.request.request_id
            assert read == chain[first : first + len(read)], f"request {name} reads {read}, and wrote {chain}"
        read_at = {(one.sequence, *one.blocks) for one in ranges}
        self.num_shared += len(read_at) > len({tuple(one.blocks) for one in ranges})
        return len(copies)

    def chain_of(self, entry: Scheduled) -> list[int]:
        """Of the tokens that are known, and of the drafts, or of the tokens that steps in flight sample."""
        request, known = entry.request, len(entry.request.output_ids)
        more = [self.token_at(request, known + n) for n in range(request.num_pending_tokens + 1)]
        if entry.num_drafts:
            more = request.draft_ids[: entry.num_drafts]
        has_segments = self.registry is not None and request in self.registry.contexts
        return self.chain([*request.token_ids, *more], AFTER_SEGMENTS if has_segments else 0)

    def chain(self, token_ids: Iterable[int], before: int = 0) -> list[int]:
        number = self.chains.setdefault
        return list(accumulate(token_ids, lambda chain, i: number((chain, i), len(self.chains) + 1), initial=before))[
            1:
        ]

    def places(self, request: Request, count: int) -> list[int]:
        """The slots of a request's first tokens."""
        if not hasattr(self.target, "rows"):
            first = self.target.regions[request] * self.target.request_capacity
            return list(range(first, first + count))
        size, table = self.target.block_size, self.target.table(request).tolist()
        return [table[index // size] * size + index % size for index in range(count)]

    def read_segments(self, request: Request, ranges: list) -> int:
        """Returns the number of the request's tokens that are segments."""
        if self.registry is None:
            return 0
        assert not self.registry.missing(request)
        size, end = self.target.block_size, 0
        for segment, one in zip(self.registry.contexts.get(request, ()), ranges, strict=True):
            assert (one.offset, one.length) == (end, len(segment))
            end += len(segment)
            read = [self.slots.get(int(one.blocks[j // size]) * size + j % size) for j in range(one.length)]
            assert read == self.chain(segment.token_ids), f"request {request.request_id} reads another segment"
        return end
