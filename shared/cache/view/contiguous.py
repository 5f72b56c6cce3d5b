"""A contiguous KV cache for one sequence, allocated once. Introduced in phase 3.

Keys and values of past tokens never change, so a step computes those of its new tokens, appends them to the cache, and
attends over all of them. Layout: one tensor for keys and one for values, ``[layer, Hkv, capacity, D]``, so the tokens
of a head are contiguous. Invariants: the first ``length`` slots hold the sequence's tokens in order; the length
(physical) is the cache's own count and is never derived from positions (logical), which belong to the request.
"""

import math

import torch
from torch import Tensor

from shared.errors import CapacityError, ConfigError
from shared.loading.placement import check_memory
from shared.models.config import ModelConfig
from shared.models.tokens import QueryKeyTransform
from shared.ops.attention import ATTENTION_BACKENDS


def kv_bytes(config: ModelConfig, num_tokens: int, dtype: torch.dtype) -> int:
    """Bytes of the KV cache of ``num_tokens`` tokens, in all layers."""
    # exercise 03x1: what one token costs, in bytes
    # hint: a key and a value, each of D numbers, for every layer and every KV head
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * num_tokens * dtype.itemsize
    # end exercise


class ContiguousCache:
    """The KV cache of one sequence of up to ``capacity`` tokens. Raises ConfigError if the capacity is not positive."""

    def __init__(
        self, config: ModelConfig, capacity: int, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> None:
        if capacity < 1:
            raise ConfigError(f"The cache's capacity is {capacity} tokens; it must be at least 1.")
        shape = (config.num_layers, config.num_kv_heads, capacity, config.head_dim)
        check_memory(2 * math.prod(shape) * dtype.itemsize, torch.device(device), f"A cache of {capacity} tokens")
        self.keys = torch.empty(shape, dtype=dtype, device=device)
        self.values = torch.empty(shape, dtype=dtype, device=device)
        self.capacity = capacity
        self.length = 0
        self.owner: str | None = None

    @property
    def num_bytes(self) -> int:
        """Allocated bytes, used or not."""
        return self.keys.nbytes + self.values.nbytes

    def reserve(self, request_id: str, num_tokens: int) -> None:
        """Reserve ``num_tokens`` more slots for a request, which owns the cache from its first call until ``release``.

        Raises CapacityError, and changes nothing, if there are not enough slots or another request owns the cache.
        """
        if num_tokens < 0:
            raise CapacityError(f"{num_tokens} slots were requested; a count cannot be negative.")
        if self.owner not in (None, request_id):
            raise CapacityError(
                f"The cache holds request {self.owner} and can hold only one sequence; release it before reserving for "
                f"request {request_id}."
            )
        if self.length + num_tokens > self.capacity:
            raise CapacityError(
                f"The cache holds {self.length} tokens of at most {self.capacity} and cannot take {num_tokens} more; "
                "shorten the prompt or raise max_seq_len."
            )
        self.owner = request_id

    def advance(self, num_tokens: int) -> None:
        """Count the tokens that a step has written."""
        self.length += num_tokens

    def truncate(self, num_tokens: int) -> None:
        """Drop all but the first ``num_tokens`` tokens; raises CapacityError if the cache holds fewer."""
        if not 0 <= num_tokens <= self.length:
            raise CapacityError(f"The cache holds {self.length} tokens and cannot be truncated to {num_tokens}.")
        self.length = num_tokens

    def release(self) -> None:
        """Drop the sequence and its owner."""
        self.length = 0
        self.owner = None


class ContiguousView:
    """The model's view of a cache during one step.

    ``prepare`` slices the cache once per step for all layers: the slots that the step writes, and those that it reads.

    Args:
        backend: ``naive`` or ``sdpa``, which is the default.
    """

    def __init__(self, cache: ContiguousCache, backend: str | None = None) -> None:
        self.cache = cache
        self.attention = ATTENTION_BACKENDS[backend or "sdpa"]

    def prepare(self, num_new: int) -> None:
        """Slice the cache for a step of T = ``num_new`` tokens, which follow the ``num_past`` cached ones.

        Sets, for each layer, the tensors that attention reads: ``keys``, ``values`` ``[Hkv, num_past + T, D]``; and
        those that the step writes: ``new_keys``, ``new_values`` ``[T, Hkv, D]``. All are views of the cache.
        """
        # exercise 03x2: slice the cache for this step
        # hint: attention reads up to the step's last token; the step writes from the end of the cached tokens on
        # hint: unbind(0) gives one view per layer; no number is copied
        start, end = self.cache.length, self.cache.length + num_new
        keys, values = self.cache.keys[:, :, :end], self.cache.values[:, :, :end]
        self.num_past = start
        self.keys, self.values = keys.unbind(0), values.unbind(0)  # for each layer [Hkv, end, D]
        self.new_keys = keys[:, :, start:].transpose(1, 2).unbind(0)  # for each layer [T, Hkv, D]
        self.new_values = values[:, :, start:].transpose(1, 2).unbind(0)
        # end exercise

    def write(self, layer: int, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, qk: QueryKeyTransform) -> Tensor:
        """See :class:`shared.models.tokens.KVView`."""
        # exercise 03x3: norm and rotate, store k and v, return the queries
        # hint: new_keys[layer] is a view of the cache: copy_ into it
        q, k = qk(q, k, positions)
        self.new_keys[layer].copy_(k)
        self.new_values[layer].copy_(v)
        return q
        # end exercise

    def attend(
        self, layer: int, q: Tensor, *, scale: float, window: int | None = None, softcap: float | None = None
    ) -> Tensor:
        """A sliding-window layer reads only keys inside the window."""
        # exercise 03x4: attend over the cache, in a sliding-window layer over the window alone
        # hint: the step's first token has index num_past and attends to window tokens, itself included
        k, v = self.keys[layer], self.values[layer]
        if window is not None and self.num_past >= window:
            first = self.num_past + 1 - window
            k, v = k[:, first:], v[:, first:]
        return self.attention(q, k, v, scale=scale, window=window, softcap=softcap)
        # end exercise
