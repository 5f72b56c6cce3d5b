"""Memory cut into slots of equal size, one for each request that runs. Introduced in phase 4.

The simplest memory for many sequences is :class:`~shared.cache.contiguous.ContiguousCache`, once for each. A slot has
room for the longest sequence there may be, so to grant one is to pop a number off a stack, and a request that got one
never runs out of memory. The price is what a short request leaves unused. Layout ``[layer, slot, Hkv, capacity, D]``: a
layer's memory is one piece, in which a token's place is an offset, so one launch can write to all slots and one can
read from them.

Invariants: each slot is free or held by one request, never both; the first ``lengths[slot]`` places of a held slot hold
the request's tokens in order; a free slot has length 0.
"""

import math
from collections.abc import Sequence
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray

from shared.cache.slotted_view import SlottedView
from shared.engine.config import EngineConfig
from shared.errors import CapacityError, ConfigError
from shared.loading.placement import check_room
from shared.models.causal_lm import CausalLM
from shared.models.config import ModelConfig


class SlottedKVCachePool:
    """Slots for ``num_slots`` requests of up to ``capacity`` tokens each; see ``CachePoolProtocol``.

    Raises ConfigError if there is no room for them or a number is not positive.
    """

    watermark_tokens = 0  # who has a slot has all that it can come to need

    def __init__(
        self,
        config: ModelConfig,
        num_slots: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        if num_slots < 1 or capacity < 1:
            raise ConfigError(f"The pool has {num_slots} slots of {capacity} tokens; it needs at least 1 of 1.")
        shape = (config.num_layers, num_slots, config.num_kv_heads, capacity, config.head_dim)
        check_room(
            2 * math.prod(shape) * dtype.itemsize,
            torch.device(device),
            f"A pool for max_batch_size = {num_slots} requests of {capacity} tokens",
        )
        self.keys = torch.empty(shape, dtype=dtype, device=device)
        self.values = torch.empty(shape, dtype=dtype, device=device)
        self.num_slots = num_slots
        self.request_capacity = capacity
        self.capacity_tokens = num_slots * capacity
        self.num_bytes = self.keys.nbytes + self.values.nbytes
        self.free_slots = list(range(num_slots))[::-1]  # the lowest is granted first
        self.slots: dict[str, int] = {}  # by request
        self.lengths = [0] * num_slots
        self.granted = [0] * num_slots
        self.used_tokens = 0

    @classmethod
    def for_engine(cls, config: EngineConfig, model: CausalLM, max_seq_len: int) -> Self:
        """See ``CachePoolProtocol``."""
        return cls(model.config, config.max_batch_size, max_seq_len, model.dtype, model.device)

    def reserve(self, request_id: str, num_tokens: int) -> bool:
        """See ``CachePoolProtocol``."""
        if not 0 <= num_tokens <= self.request_capacity:
            raise CapacityError(
                f"Request {request_id} asks for {num_tokens} tokens and a slot has {self.request_capacity}; shorten "
                "the prompt or the answer, or raise max_seq_len."
            )
        # exercise 04.2: grant a request its slot
        # hint: a request that holds a slot keeps it; another gets the top of the stack of free ones
        # hint: where no slot is free the answer is False, and nothing has changed
        # hint: what was granted stays granted: a smaller wish takes nothing back
        slot = self.slots.get(request_id)
        if slot is None:
            if not self.free_slots:
                return False
            slot = self.slots[request_id] = self.free_slots.pop()
        self.granted[slot] = max(self.granted[slot], num_tokens)
        return True
        # end exercise

    def advance(self, request_id: str, num_tokens: int) -> None:
        """See ``CachePoolProtocol``."""
        slot = self._slot(request_id)
        if num_tokens < 0 or self.lengths[slot] + num_tokens > self.granted[slot]:
            raise CapacityError(
                f"Request {request_id} has {self.lengths[slot]} tokens of {self.granted[slot]} that it was granted and "
                f"cannot have {num_tokens} more; reserve them first."
            )
        self.lengths[slot] += num_tokens
        self.used_tokens += num_tokens

    def truncate(self, request_id: str, num_tokens: int) -> None:
        """See ``CachePoolProtocol``."""
        slot = self._slot(request_id)
        if not 0 <= num_tokens <= self.lengths[slot]:
            raise CapacityError(
                f"Request {request_id} has {self.lengths[slot]} tokens in memory and cannot be cut to {num_tokens}."
            )
        self.used_tokens -= self.lengths[slot] - num_tokens
        self.lengths[slot] = num_tokens

    def release(self, request_id: str) -> None:
        """See ``CachePoolProtocol``."""
        slot = self.slots.pop(request_id, None)
        if slot is not None:
            self.used_tokens -= self.lengths[slot]
            self.lengths[slot] = self.granted[slot] = 0
            self.free_slots.append(slot)

    def length(self, request_id: str) -> int:
        """See ``CachePoolProtocol``."""
        slot = self.slots.get(request_id)
        return 0 if slot is None else self.lengths[slot]

    @property
    def free_tokens(self) -> int:
        """See ``CachePoolProtocol``."""
        return len(self.free_slots) * self.request_capacity

    def holdings(self) -> tuple[int, dict[str, list[int]]]:
        """See ``CachePoolProtocol``."""
        return self.request_capacity, {request_id: [slot] for request_id, slot in self.slots.items()}

    def audit(self) -> list[str]:
        """See ``CachePoolProtocol``."""
        found = [
            f"Request {request_id} holds slot {slot} with {self.lengths[slot]} tokens of {self.granted[slot]} granted."
            for request_id, slot in self.slots.items()
        ]
        held = sorted([*self.slots.values(), *self.free_slots])
        if held != list(range(self.num_slots)):
            found.append(f"Of slots 0 to {self.num_slots - 1} these are held or free: {held}.")
        found += [
            f"Slot {slot} is free and has length {self.lengths[slot]} of {self.granted[slot]} granted."
            for slot in self.free_slots
            if self.lengths[slot] or self.granted[slot]
        ]
        found += [
            f"Slot {slot} holds {self.lengths[slot]} tokens and {self.granted[slot]} were granted."
            for slot in range(self.num_slots)
            if self.lengths[slot] > self.granted[slot]
        ]
        if self.used_tokens != sum(self.lengths):
            found.append(f"The slots hold {sum(self.lengths)} tokens and {self.used_tokens} are counted.")
        return found

    def view(self, num_heads: int, backend: str | None = None) -> SlottedView:
        """See ``CachePoolProtocol``; raises ConfigError if ``flash`` has no kernel for the model's head size."""
        return SlottedView(self, num_heads, backend)

    def places(self, request_ids: Sequence[str]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Slot, length and grant of each request; raises CapacityError for one that holds nothing."""
        slots = [self._slot(request_id) for request_id in request_ids]
        lengths = [self.lengths[slot] for slot in slots]
        granted = [self.granted[slot] for slot in slots]
        return np.array(slots), np.array(lengths), np.array(granted)

    def _slot(self, request_id: str) -> int:
        slot = self.slots.get(request_id)
        if slot is None:
            raise CapacityError(f"Request {request_id} holds no slot; reserve one first.")
        return slot
