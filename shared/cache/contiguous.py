"""One sequence's keys and values in one piece of memory, allocated once. Introduced in phase 3.

Keys and values of past tokens never change, so a step computes those of its new tokens, writes them behind the others
and attends over all. Layout: one tensor for keys and one for values, ``[layer, Hkv, capacity, D]``, so that the tokens
of a head lie next to each other. Invariants: the first ``length`` places hold the sequence's tokens in order; the
length (physical) is the cache's own count and is never derived from positions (logical), which belong to the request.
"""

import math

import torch

from shared.errors import CapacityError, ConfigError
from shared.loading.placement import check_room
from shared.models.config import ModelConfig
from shared.models.tokens import QueryKeyTransform
from shared.ops.attention import ATTENTION_BACKENDS


def kv_bytes(config: ModelConfig, num_tokens: int, dtype: torch.dtype) -> int:
    """Bytes of keys and values of ``num_tokens`` tokens: 2 · layers · Hkv · D · tokens · bytes per number."""
    # exercise 03x1: what one token costs, in bytes
    # hint: a key and a value, each of D numbers, for every layer and every key head
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * num_tokens * dtype.itemsize
    # end exercise


class ContiguousCache:
    """Room for one sequence of up to ``capacity`` tokens. Raises ConfigError if the capacity is not positive."""

    def __init__(
        self, config: ModelConfig, capacity: int, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> None:
        if capacity < 1:
            raise ConfigError(f"The cache's capacity is {capacity} tokens; it must be at least 1.")
        shape = (config.num_layers, config.num_kv_heads, capacity, config.head_dim)
        check_room(2 * math.prod(shape) * dtype.itemsize, torch.device(device), f"A cache of {capacity} tokens")
        self.keys = torch.empty(shape, dtype=dtype, device=device)
        self.values = torch.empty(shape, dtype=dtype, device=device)
        self.capacity = capacity
        self.length = 0
        self.owner: str | None = None

    @property
    def num_bytes(self) -> int:
        """What the cache occupies, used or not."""
        return self.keys.nbytes + self.values.nbytes

    def reserve(self, request_id: str, num_tokens: int) -> None:
        """Make sure of ``num_tokens`` more places for a request; the first to ask owns the cache until its release.

        Raises CapacityError, with nothing changed, if the places do not suffice or another request owns the cache.
        """
        if num_tokens < 0:
            raise CapacityError(f"{num_tokens} places were asked of the cache; a length cannot be negative.")
        if self.owner not in (None, request_id):
            raise CapacityError(
                f"The cache holds request {self.owner} and has room for one sequence; request {request_id} must wait, "
                "or run in an engine of its own."
            )
        if self.length + num_tokens > self.capacity:
            raise CapacityError(
                f"The cache holds {self.length} tokens of at most {self.capacity} and cannot take {num_tokens} more; "
                "shorten the prompt or raise max_seq_len."
            )
        self.owner = request_id

    def advance(self, num_tokens: int) -> None:
        """Count tokens that a step has written."""
        self.length += num_tokens

    def truncate(self, num_tokens: int) -> None:
        """Forget all but the first ``num_tokens`` tokens; raises CapacityError if there are not so many."""
        if not 0 <= num_tokens <= self.length:
            raise CapacityError(f"The cache holds {self.length} tokens and cannot be cut to {num_tokens}.")
        self.length = num_tokens

    def release(self) -> None:
        """Forget the sequence and its owner."""
        self.length = 0
        self.owner = None


class ContiguousView:
    """A cache as the model sees it during one step of ``num_new`` tokens.

    Where the new tokens go and what they may read is cut out of the cache once a step, for all layers together.

    Args:
        backend: ``naive`` or ``sdpa``, which is the default.
    """

    def __init__(self, cache: ContiguousCache, backend: str | None = None) -> None:
        self.cache = cache
        self.attention = ATTENTION_BACKENDS[backend or "sdpa"]

    def prepare(self, num_new: int) -> None:
        """Say how many tokens T the coming step brings; they go to the places behind the ``num_past`` cached ones.

        For each layer, what attention reads: ``keys``, ``values`` ``[Hkv, num_past + T, D]``; and where this step's are
        put: ``new_keys``, ``new_values`` ``[T, Hkv, D]``. All are views into the cache.
        """
        # exercise 03x2: cut this step's places out of the cache
        # hint: what attention reads ends with the step's last token; what the step writes begins behind the cached ones
        # hint: unbind(0) gives one view per layer; none of this copies a number
        start, end = self.cache.length, self.cache.length + num_new
        keys, values = self.cache.keys[:, :, :end], self.cache.values[:, :, :end]
        self.num_past = start
        self.keys, self.values = keys.unbind(0), values.unbind(0)  # of each layer [Hkv, end, D]
        self.new_keys = keys[:, :, start:].transpose(1, 2).unbind(0)  # of each layer [T, Hkv, D]
        self.new_values = values[:, :, start:].transpose(1, 2).unbind(0)
        # end exercise

    def write(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        positions: torch.Tensor,
        qk: QueryKeyTransform,
    ) -> torch.Tensor:
        """See :class:`shared.models.tokens.KVView`."""
        # exercise 03x3: norm and rotate, put k and v in their places, give the queries back
        # hint: new_keys[layer] is a view into the cache: copy_ into it
        q, k = qk(q, k, positions)
        self.new_keys[layer].copy_(k)
        self.new_values[layer].copy_(v)
        return q
        # end exercise

    def attend(
        self, layer: int, q: torch.Tensor, *, scale: float, window: int | None = None, softcap: float | None = None
    ) -> torch.Tensor:
        """See :class:`shared.models.tokens.KVView`; of a windowed layer only what a new token can see is read."""
        # exercise 03x4: attend over the cache, of a windowed layer over its window alone
        # hint: the step's first token stands at index num_past and sees window tokens, itself included
        k, v = self.keys[layer], self.values[layer]
        if window is not None and self.num_past >= window:
            first = self.num_past + 1 - window
            k, v = k[:, first:], v[:, first:]
        return self.attention(q, k, v, scale=scale, window=window, softcap=softcap)
        # end exercise
