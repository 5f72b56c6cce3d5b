"""A KV cache pool of equal contiguous regions, one per running request: the host side. Introduced in phase 4.

The simplest KV cache for many sequences is one :class:`~shared.cache.view.contiguous.ContiguousCache` for each. A
region can hold the longest possible sequence, so allocation pops a number off a stack, and a running request never runs
out of space. The cost is internal fragmentation: a short request leaves most of its region unused.

Invariants: each region is free or held by one request, never both; the first ``lengths[region]`` slots of a held region
hold the request's tokens in order; a free region has length 0.
"""

from collections.abc import Iterable

import numpy as np

from shared.cache.layout.slots import Layout, before_and_after, ranges
from shared.engine.request import Request
from shared.errors import CapacityError, ConfigError
from shared.scheduling.schedule import Schedule


class ContiguousKVCachePool:
    """Regions for ``max_sequences`` requests of up to ``request_capacity`` tokens each; see ``CachePoolProtocol``.

    Raises ConfigError if either is not positive.
    """

    watermark_tokens = 0  # a region never has to grow

    def __init__(self, max_sequences: int, request_capacity: int) -> None:
        if max_sequences < 1 or request_capacity < 1:
            raise ConfigError(
                f"The pool has {max_sequences} regions of {request_capacity} tokens; both must be at least 1."
            )
        self.max_sequences = max_sequences
        self.request_capacity = request_capacity
        self.capacity_tokens = max_sequences * request_capacity
        self.free_regions = list(range(max_sequences))[::-1]  # the lowest is allocated first
        self.regions: dict[Request, int] = {}
        self.lengths = [0] * max_sequences
        self.granted = [0] * max_sequences
        self.used_tokens = 0

    def admit(self, request: Request) -> int:
        return 0

    def must_wait(self, request: Request) -> bool:
        return False

    def reserve(self, request: Request, num_tokens: int) -> bool:
        if not 0 <= num_tokens <= self.request_capacity:
            raise CapacityError(
                f"Request {request.request_id} asks for {num_tokens} tokens and a region has {self.request_capacity}; "
                "shorten the prompt, lower max_new_tokens, or raise max_seq_len."
            )
        # exercise 04x2: allocate a region
        # hint: a request that holds a region keeps it; a new one gets the top of the stack of free regions
        # hint: if no region is free, return False and change nothing
        # hint: granted never shrinks: a smaller num_tokens frees nothing
        region = self.regions.get(request)
        if region is None:
            if not self.free_regions:
                return False
            region = self.regions[request] = self.free_regions.pop()
        self.granted[region] = max(self.granted[region], num_tokens)
        return True
        # end exercise

    def commit(self, request: Request, num_tokens: int) -> None:
        region = self._region(request)
        if num_tokens < 0 or self.lengths[region] + num_tokens > self.granted[region]:
            raise CapacityError(
                f"Request {request.request_id} has {self.lengths[region]} of {self.granted[region]} reserved tokens "
                f"and cannot have {num_tokens} more; reserve them first."
            )
        self.lengths[region] += num_tokens
        self.used_tokens += num_tokens

    def reserve_next(self, requests: Iterable[Request]) -> list[Request]:
        """``reserve`` does this."""
        return list(requests)

    def commit_next(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self.commit(request, 1)

    def truncate(self, request: Request, num_tokens: int) -> None:
        region = self._region(request)
        if not 0 <= num_tokens <= self.lengths[region]:
            raise CapacityError(
                f"Request {request.request_id} has {self.lengths[region]} cached tokens and cannot be truncated to "
                f"{num_tokens}."
            )
        self.used_tokens -= self.lengths[region] - num_tokens
        self.lengths[region] = num_tokens

    def shrink(self, request: Request, num_tokens: int) -> None:
        """The region stays whole."""
        region = self._region(request)
        self.granted[region] = max(self.lengths[region], min(num_tokens, self.granted[region]))

    def release(self, request: Request) -> None:
        region = self.regions.pop(request, None)
        if region is not None:
            self.used_tokens -= self.lengths[region]
            self.lengths[region] = self.granted[region] = 0
            self.free_regions.append(region)

    def length(self, request: Request) -> int:
        region = self.regions.get(request)
        return 0 if region is None else self.lengths[region]

    @property
    def free_tokens(self) -> int:
        return len(self.free_regions) * self.request_capacity

    def layout(self, schedule: Schedule) -> Layout:
        regions = [self._region(request) for request in schedule.requests]
        num_cached, lengths = before_and_after(schedule, regions, self.lengths, self.granted)
        rows = np.array(regions, np.int64)
        # exercise 04x3: the slot of each new token
        # hint: region r begins at slot r * request_capacity
        # hint: a sequence's first new token follows its num_cached cached tokens
        # hint: it has lengths - num_cached new tokens: ranges(first, counts) counts up from each first slot
        slot_mapping = ranges(rows * self.request_capacity + num_cached, lengths - num_cached)  # [T]
        # end exercise
        return Layout(rows, num_cached, lengths, slot_mapping)

    def holdings(self) -> tuple[int, dict[Request, list[int]]]:
        return self.request_capacity, {request: [region] for request, region in self.regions.items()}

    def cached_blocks(self) -> list[int]:
        return []

    def drop_cached(self) -> None:
        """See ``CachePoolProtocol``."""

    def audit(self) -> list[str]:
        found = [
            f"Request {request.request_id} holds region {region} with {self.lengths[region]} tokens of "
            f"{self.granted[region]} reserved."
            for request, region in self.regions.items()
        ]
        held = sorted([*self.regions.values(), *self.free_regions])
        if held != list(range(self.max_sequences)):
            found.append(f"Regions 0 to {self.max_sequences - 1} must each be held or free once; these are: {held}.")
        found += [
            f"Region {region} is free and has length {self.lengths[region]} of {self.granted[region]} reserved."
            for region in self.free_regions
            if self.lengths[region] or self.granted[region]
        ]
        found += [
            f"Region {region} holds {self.lengths[region]} tokens and {self.granted[region]} are reserved."
            for region in range(self.max_sequences)
            if self.lengths[region] > self.granted[region]
        ]
        if self.used_tokens != sum(self.lengths):
            found.append(f"The regions hold {sum(self.lengths)} tokens and used_tokens is {self.used_tokens}.")
        return found

    def _region(self, request: Request) -> int:
        region = self.regions.get(request)
        if region is None:
            raise CapacityError(f"Request {request.request_id} holds no region; reserve one first.")
        return region
