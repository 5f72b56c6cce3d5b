"""Memory cut into regions of equal size, one for each request that runs. Introduced in phase 4.

The simplest memory for many sequences is :class:`~shared.cache.contiguous.ContiguousCache`, once for each. A region has
room for the longest sequence there may be, so to grant one is to pop a number off a stack, and a request that got one
never runs out of memory. The price is what a short request leaves unused. Layout ``[layer, region, Hkv, capacity, D]``: a
layer's memory is one piece, in which a token's place is an offset, so one launch can write to all regions and one can
read from them.

Invariants: each region is free or held by one request, never both; the first ``lengths[region]`` places of a held region hold
the request's tokens in order; a free region has length 0.
"""

import math
from collections.abc import Sequence
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray

from shared.cache.contiguous_pool_view import ContiguousPoolView
from shared.engine.config import EngineConfig
from shared.errors import CapacityError, ConfigError
from shared.loading.placement import check_room
from shared.models.causal_lm import CausalLM
from shared.models.config import ModelConfig


class ContiguousKVCachePool:
    """Regions for ``num_regions`` requests of up to ``capacity`` tokens each; see ``CachePoolProtocol``.

    Raises ConfigError if there is no room for them or a number is not positive.
    """

    watermark_tokens = 0  # who has a region has all that it can come to need

    def __init__(
        self,
        config: ModelConfig,
        num_regions: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        if num_regions < 1 or capacity < 1:
            raise ConfigError(f"The pool has {num_regions} regions of {capacity} tokens; it needs at least 1 of 1.")
        shape = (config.num_layers, num_regions, config.num_kv_heads, capacity, config.head_dim)
        check_room(
            2 * math.prod(shape) * dtype.itemsize,
            torch.device(device),
            f"A pool for max_batch_size = {num_regions} requests of {capacity} tokens",
        )
        self.keys = torch.empty(shape, dtype=dtype, device=device)
        self.values = torch.empty(shape, dtype=dtype, device=device)
        self.num_regions = num_regions
        self.request_capacity = capacity
        self.capacity_tokens = num_regions * capacity
        self.num_bytes = self.keys.nbytes + self.values.nbytes
        self.free_regions = list(range(num_regions))[::-1]  # the lowest is granted first
        self.regions: dict[str, int] = {}  # by request
        self.lengths = [0] * num_regions
        self.granted = [0] * num_regions
        self.used_tokens = 0

    @classmethod
    def for_engine(cls, config: EngineConfig, model: CausalLM, max_seq_len: int) -> Self:
        """See ``CachePoolProtocol``."""
        return cls(model.config, config.max_batch_size, max_seq_len, model.dtype, model.device)

    def reserve(self, request_id: str, num_tokens: int) -> bool:
        """See ``CachePoolProtocol``."""
        if not 0 <= num_tokens <= self.request_capacity:
            raise CapacityError(
                f"Request {request_id} asks for {num_tokens} tokens and a region has {self.request_capacity}; shorten "
                "the prompt or the answer, or raise max_seq_len."
            )
        # exercise 04.2: grant a request its region
        # hint: a request that holds a region keeps it; another gets the top of the stack of free ones
        # hint: where no region is free the answer is False, and nothing has changed
        # hint: what was granted stays granted: a smaller wish takes nothing back
        region = self.regions.get(request_id)
        if region is None:
            if not self.free_regions:
                return False
            region = self.regions[request_id] = self.free_regions.pop()
        self.granted[region] = max(self.granted[region], num_tokens)
        return True
        # end exercise

    def advance(self, request_id: str, num_tokens: int) -> None:
        """See ``CachePoolProtocol``."""
        region = self._region(request_id)
        if num_tokens < 0 or self.lengths[region] + num_tokens > self.granted[region]:
            raise CapacityError(
                f"Request {request_id} has {self.lengths[region]} tokens of {self.granted[region]} that it was granted and "
                f"cannot have {num_tokens} more; reserve them first."
            )
        self.lengths[region] += num_tokens
        self.used_tokens += num_tokens

    def truncate(self, request_id: str, num_tokens: int) -> None:
        """See ``CachePoolProtocol``."""
        region = self._region(request_id)
        if not 0 <= num_tokens <= self.lengths[region]:
            raise CapacityError(
                f"Request {request_id} has {self.lengths[region]} tokens in memory and cannot be cut to {num_tokens}."
            )
        self.used_tokens -= self.lengths[region] - num_tokens
        self.lengths[region] = num_tokens

    def release(self, request_id: str) -> None:
        """See ``CachePoolProtocol``."""
        region = self.regions.pop(request_id, None)
        if region is not None:
            self.used_tokens -= self.lengths[region]
            self.lengths[region] = self.granted[region] = 0
            self.free_regions.append(region)

    def length(self, request_id: str) -> int:
        """See ``CachePoolProtocol``."""
        region = self.regions.get(request_id)
        return 0 if region is None else self.lengths[region]

    @property
    def free_tokens(self) -> int:
        """See ``CachePoolProtocol``."""
        return len(self.free_regions) * self.request_capacity

    def holdings(self) -> tuple[int, dict[str, list[int]]]:
        """See ``CachePoolProtocol``."""
        return self.request_capacity, {request_id: [region] for request_id, region in self.regions.items()}

    def audit(self) -> list[str]:
        """See ``CachePoolProtocol``."""
        found = [
            f"Request {request_id} holds region {region} with {self.lengths[region]} tokens of {self.granted[region]} granted."
            for request_id, region in self.regions.items()
        ]
        held = sorted([*self.regions.values(), *self.free_regions])
        if held != list(range(self.num_regions)):
            found.append(f"Of regions 0 to {self.num_regions - 1} these are held or free: {held}.")
        found += [
            f"Region {region} is free and has length {self.lengths[region]} of {self.granted[region]} granted."
            for region in self.free_regions
            if self.lengths[region] or self.granted[region]
        ]
        found += [
            f"Region {region} holds {self.lengths[region]} tokens and {self.granted[region]} were granted."
            for region in range(self.num_regions)
            if self.lengths[region] > self.granted[region]
        ]
        if self.used_tokens != sum(self.lengths):
            found.append(f"The regions hold {sum(self.lengths)} tokens and {self.used_tokens} are counted.")
        return found

    def view(self, num_heads: int, backend: str | None = None) -> ContiguousPoolView:
        """See ``CachePoolProtocol``; raises ConfigError if ``flash`` has no kernel for the model's head size."""
        return ContiguousPoolView(self, num_heads, backend)

    def places(self, request_ids: Sequence[str]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Region, length and grant of each request; raises CapacityError for one that holds nothing."""
        regions = [self._region(request_id) for request_id in request_ids]
        lengths = [self.lengths[region] for region in regions]
        granted = [self.granted[region] for region in regions]
        return np.array(regions), np.array(lengths), np.array(granted)

    def _region(self, request_id: str) -> int:
        region = self.regions.get(request_id)
        if region is None:
            raise CapacityError(f"Request {request_id} holds no region; reserve one first.")
        return region
