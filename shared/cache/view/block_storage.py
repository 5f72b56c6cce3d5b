"""The tensors of a paged KV cache: keys and values in blocks. Introduced in phase 6.

Layout ``[layer, block, offset, Hkv, D]``: the tokens of all blocks of a layer are contiguous, so a token has one index,
its slot, and its heads are adjacent. A storage decides how a number is stored; kernels read its tensors with its
``arguments``, and PyTorch's operations write and read through its methods. Invariant: a storage writes wherever it is
told to; only the pool knows which slots are free.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shared.cache.free_memory import free_bytes
from shared.cache.layout.paged import PagedSizes
from shared.cache.view.contiguous import kv_bytes
from shared.engine.config import EngineConfig
from shared.errors import ConfigError
from shared.models.causal_lm import CausalLM
from shared.models.config import ModelConfig

KeysAndValues = tuple[Tensor, Tensor]


class BlockStorage(Protocol):
    """Keys and values in blocks."""

    keys: Tensor  # as they are stored
    values: Tensor
    layer_keys: tuple[Tensor, ...]  # for each layer, as kernels read them
    layer_values: tuple[Tensor, ...]
    arguments: Sequence[dict[str, Any]]  # arguments of each layer's kernels, besides keys and values
    num_bytes: int

    def write(self, layer: int, k: Tensor, v: Tensor, slots: Tensor) -> None:
        """Store keys and values ``[T, Hkv, D]`` in ``slots``, int64 ``[T]``, with PyTorch's operations."""
        ...

    def make_readable(self) -> None:
        """Allocate what :meth:`read` needs; called once, before the first step."""
        ...

    def read(self, layer: int, blocks: Tensor) -> KeysAndValues:
        """Keys and values ``[n · block_size, Hkv, D]`` of int64 ``blocks [n]``; valid until the next call."""
        ...

    def copy(self, copies: NDArray[np.int32]) -> None:
        """Copy blocks, in all layers; ``copies`` as in ``PagedLayout``."""
        ...


MakeStorage = Callable[[EngineConfig, CausalLM, PagedSizes], BlockStorage]
"""Makes the storage of an engine; raises ConfigError if the device has too little memory."""


class PlainStorage:
    """Keys and values in one dtype, mostly the model's; see :class:`BlockStorage`.

    The blocks of one sequence at a time are read into a small buffer that all sequences and layers reuse. It stays in
    the processor's caches, so this is faster than reading all sequences at once.
    """

    def __init__(
        self, config: ModelConfig, sizes: PagedSizes, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> None:
        device = torch.device(device)
        self.num_bytes = kv_bytes(config, sizes.num_blocks * sizes.block_size, dtype)
        if self.num_bytes > (free := free_bytes(device)):
            raise ConfigError(
                f"{sizes.num_blocks} blocks of {sizes.block_size} tokens take {self.num_bytes / 1e9:,.2f} GB and "
                f"{device} has {free / 1e9:,.2f} GB free; lower num_gpu_blocks, or leave it out to use free memory."
            )
        shape = (config.num_layers, sizes.num_blocks, sizes.block_size, config.num_kv_heads, config.head_dim)
        self.keys, self.values = (torch.empty(shape, dtype=dtype, device=device) for _ in range(2))
        self.rows = [memory.flatten(1, 2).flatten(2).unbind(0) for memory in (self.keys, self.values)]
        self.blocks = [memory.flatten(2).unbind(0) for memory in (self.keys, self.values)]
        self.most_blocks = -(-sizes.max_seq_len // sizes.block_size)  # of a sequence
        self.layer_keys, self.layer_values = self.keys.unbind(0), self.values.unbind(0)
        self.arguments: Sequence[dict[str, Any]] = [{}] * config.num_layers

    @classmethod
    def of(cls, config: EngineConfig, model: CausalLM, sizes: PagedSizes) -> Self:
        """See ``MakeStorage``."""
        return cls(model.config, sizes, model.dtype, model.device)

    def write(self, layer: int, k: Tensor, v: Tensor, slots: Tensor) -> None:
        for rows, new in zip(self.rows, (k, v), strict=True):
            rows[layer].index_copy_(0, slots, new.flatten(1))

    def make_readable(self) -> None:
        keys = self.blocks[0][0]
        self.buffer = keys.new_empty(2, self.most_blocks, keys.shape[1])

    def read(self, layer: int, blocks: Tensor) -> KeysAndValues:
        keys, values = self.blocks[0][layer], self.blocks[1][layer]
        k, v = self.buffer[:, : len(blocks)]
        torch.index_select(keys, 0, blocks, out=k)
        torch.index_select(values, 0, blocks, out=v)
        return k.view(-1, *self.keys.shape[3:]), v.view(-1, *self.keys.shape[3:])

    def copy(self, copies: NDArray[np.int32]) -> None:
        for source, target in copies.tolist():
            self.keys[:, target] = self.keys[:, source]
            self.values[:, target] = self.values[:, source]
