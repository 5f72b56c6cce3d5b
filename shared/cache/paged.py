"""Memory cut into blocks of a few tokens, as many for each request as it fills. Introduced in phase 6.

A region must have room for the longest sequence there may be; what a short one leaves is lost. Here a request holds
blocks, which need not lie together, and its block table says where its tokens are: token t stands at place
``t % block_size`` of block ``table[t // block_size]``. What is lost is less than a block for each request
(PagedAttention: Kwon et al., SOSP 2023, arXiv 2309.06180). Layout ``[layer, block, place, Hkv, D]``: of a layer the
tokens of all blocks lie one behind the other, so token t has one number there, its slot, and its heads one piece of
memory.

Invariants: a request holds exactly the blocks that its grant fills, and the allocator knows each of them as its own; no
block stands in two tables; the first ``length`` places of a table hold the request's tokens in order.
"""

import math
from collections.abc import Collection, Sequence
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray

from shared.cache.blocks import BlockAllocator, Blocks
from shared.cache.contiguous import kv_bytes
from shared.cache.paged_view import PagedView
from shared.cache.pool_size import free_bytes, num_blocks_that_fit
from shared.engine.config import EngineConfig
from shared.errors import CapacityError, ConfigError
from shared.models.causal_lm import CausalLM
from shared.models.config import ModelConfig

WATERMARK = 0.01
"""Share of the blocks that admission leaves free, as in vLLM: room to grow for those that run."""


class PagedKVCachePool:
    """Blocks for up to ``max_sequences`` requests at a time; see ``CachePoolProtocol``.

    Args:
        num_blocks: blocks of ``block_size`` tokens each.
        request_capacity: the most tokens of one request; None, and at most, all there are.

    Raises:
        ConfigError: a number is not positive, or there is no room for so many blocks.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        max_sequences: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        request_capacity: int | None = None,
    ) -> None:
        if min(num_blocks, block_size, max_sequences) < 1:
            raise ConfigError(
                f"The pool has {num_blocks} blocks of {block_size} tokens for {max_sequences} sequences; it needs at "
                "least 1 of each."
            )
        self.capacity_tokens = num_blocks * block_size
        self.num_bytes = kv_bytes(config, self.capacity_tokens, dtype)
        if self.num_bytes > (free := free_bytes(torch.device(device))):
            raise ConfigError(
                f"{num_blocks} blocks of {block_size} tokens take {self.num_bytes / 1e9:,.2f} GB and {device} has "
                f"{free / 1e9:,.2f} GB free; lower num_gpu_blocks, or leave it out to take what is left."
            )
        shape = (config.num_layers, num_blocks, block_size, config.num_kv_heads, config.head_dim)
        self.keys = torch.empty(shape, dtype=dtype, device=device)
        self.values = torch.empty(shape, dtype=dtype, device=device)
        self.config = config
        self.block_size = block_size
        self.max_sequences = max_sequences
        self.watermark_tokens = math.ceil(WATERMARK * num_blocks) * block_size
        self.request_capacity = min(request_capacity or self.capacity_tokens, self.capacity_tokens)
        self.allocator = BlockAllocator(num_blocks)
        self.rows: dict[str, int] = {}  # of the arrays below, by request
        self.free_rows = list(range(max_sequences))[::-1]
        self.tables: Blocks = np.zeros((max_sequences, self.blocks_for(self.request_capacity)), np.int32)
        self.num_held = [0] * max_sequences  # blocks: what is valid of a row of the tables
        self.granted = [0] * max_sequences  # tokens
        self.lengths = [0] * max_sequences
        self.used_tokens = 0

    @classmethod
    def for_engine(cls, config: EngineConfig, model: CausalLM, max_seq_len: int) -> Self:
        """See ``CachePoolProtocol``; raises ConfigError also if a sequence of ``max_seq_len`` tokens would not fit."""
        about = (model.dtype, model.device, max_seq_len)
        num_blocks = config.num_gpu_blocks
        if num_blocks is None:
            num_blocks = num_blocks_that_fit(
                config,
                model,
                max_seq_len,
                lambda blocks, sequences: cls(model.config, blocks, config.block_size, sequences, *about),
            )
        needed = -(-max_seq_len // config.block_size)
        if num_blocks < needed:
            whence = "" if config.num_gpu_blocks is not None else ", all that the memory has room for"
            raise ConfigError(
                f"num_gpu_blocks is {num_blocks}{whence}: {num_blocks * config.block_size} tokens in blocks of "
                f"{config.block_size}. One sequence may have max_seq_len = {max_seq_len} tokens, which is {needed} "
                "blocks; raise the one or lower the other."
            )
        return cls(model.config, num_blocks, config.block_size, config.max_batch_size, *about)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that so many tokens of one request fill."""
        return -(-num_tokens // self.block_size)

    def reserve(self, request_id: str, num_tokens: int) -> bool:
        """See ``CachePoolProtocol``; takes the blocks that are missing, all of them or none."""
        if not 0 <= num_tokens <= self.request_capacity:
            raise CapacityError(
                f"Request {request_id} asks for {num_tokens} tokens and the pool has {self.request_capacity} for one "
                "request; shorten the prompt or the answer, or raise max_seq_len or num_gpu_blocks."
            )
        # exercise 06.2: let a block table grow
        # hint: a request that holds something has a row of the tables; num_held says how much of the row is valid
        # hint: a new one needs a row of free_rows; where no row is free the answer is False, and nothing has changed
        # hint: blocks_for says how many blocks it must hold in all: ask the allocator for those that are missing
        # hint: the allocator answers None when it cannot give them all; take a row only after it has given them
        # hint: new blocks stand behind those that are there; a smaller wish takes nothing back, from granted either
        row = self.rows.get(request_id)
        held = 0 if row is None else self.num_held[row]
        if row is None or num_tokens > held * self.block_size:
            if row is None and not self.free_rows:
                return False
            blocks = self.allocator.allocate_many(self.blocks_for(num_tokens) - held, request_id)
            if blocks is None:
                return False
            if row is None:
                row = self.rows[request_id] = self.free_rows.pop()
            self.num_held[row] += len(blocks)
            self.tables[row, held : held + len(blocks)] = blocks
        self.granted[row] = max(self.granted[row], num_tokens)
        return True
        # end exercise

    def shrink(self, request_id: str, num_tokens: int) -> None:
        """Lower a request's grant to so many tokens and take back the blocks behind them.

        Raises CapacityError, with nothing changed, for fewer than it has or more than it was granted.
        """
        row = self._row(request_id)
        if not self.lengths[row] <= num_tokens <= self.granted[row]:
            raise CapacityError(
                f"Request {request_id} has {self.lengths[row]} tokens of {self.granted[row]} that it was granted; its "
                f"grant cannot be lowered to {num_tokens}."
            )
        kept = self.blocks_for(num_tokens)
        self.allocator.free_many(self.tables[row, kept : self.num_held[row]], request_id)
        self.num_held[row] = kept
        self.granted[row] = num_tokens

    def advance(self, request_id: str, num_tokens: int) -> None:
        """See ``CachePoolProtocol``."""
        row = self._row(request_id)
        if num_tokens < 0 or self.lengths[row] + num_tokens > self.granted[row]:
            raise CapacityError(
                f"Request {request_id} has {self.lengths[row]} tokens of {self.granted[row]} that it was granted and "
                f"cannot have {num_tokens} more; reserve them first."
            )
        self.lengths[row] += num_tokens
        self.used_tokens += num_tokens

    def truncate(self, request_id: str, num_tokens: int) -> None:
        """See ``CachePoolProtocol``; :meth:`shrink` gives blocks back as well."""
        row = self._row(request_id)
        if not 0 <= num_tokens <= self.lengths[row]:
            raise CapacityError(
                f"Request {request_id} has {self.lengths[row]} tokens in memory and cannot be cut to {num_tokens}."
            )
        self.used_tokens -= self.lengths[row] - num_tokens
        self.lengths[row] = num_tokens

    def release(self, request_id: str) -> None:
        """See ``CachePoolProtocol``."""
        row = self.rows.get(request_id)
        if row is None:
            return
        self.allocator.free_many(self.tables[row, : self.num_held[row]], request_id)
        del self.rows[request_id]
        self.used_tokens -= self.lengths[row]
        self.num_held[row] = self.granted[row] = self.lengths[row] = 0
        self.free_rows.append(row)

    def reclaim(self, live_ids: Collection[str]) -> list[str]:
        """Take back what requests hold that live no more, and blocks whose owner has no table; a sentence for each.

        What a scheduler that loses a request would otherwise lose for good.
        """
        found = []
        for request_id in [name for name in self.rows if name not in live_ids]:
            found.append(f"Request {request_id} is gone and held {self.num_held[self.rows[request_id]]} blocks.")
            self.release(request_id)
        for owner, blocks in self.allocator.leaks(self.rows).items():
            found.append(f"Request {owner} is gone and blocks {blocks.tolist()} were its own.")
            self.allocator.free_many(blocks, owner)
        return found

    def length(self, request_id: str) -> int:
        """See ``CachePoolProtocol``."""
        row = self.rows.get(request_id)
        return 0 if row is None else self.lengths[row]

    @property
    def free_tokens(self) -> int:
        """See ``CachePoolProtocol``; what is left in the last blocks of requests is not counted."""
        return self.allocator.num_free * self.block_size

    def holdings(self) -> tuple[int, dict[str, list[int]]]:
        """See ``CachePoolProtocol``."""
        tables = {request_id: self.tables[row, : self.num_held[row]].tolist() for request_id, row in self.rows.items()}
        return self.block_size, tables

    def table(self, request_id: str) -> Blocks:
        """The block table of a request; empty for one that holds nothing."""
        row = self.rows.get(request_id)
        return self.tables[0, :0] if row is None else self.tables[row, : self.num_held[row]].copy()

    def audit(self) -> list[str]:
        """See ``CachePoolProtocol``."""
        found = [
            f"Request {request_id} holds {self.num_held[row]} blocks with {self.lengths[row]} tokens of "
            f"{self.granted[row]} granted."
            for request_id, row in self.rows.items()
        ]
        found += self.audit_blocks()
        if sorted([*self.rows.values(), *self.free_rows]) != list(range(self.max_sequences)):
            found.append(f"Of {self.max_sequences} rows {self.rows} are held and {self.free_rows} free.")
        found += [
            f"Row {row} is free and has {self.lengths[row]} tokens of {self.granted[row]} granted."
            for row in self.free_rows
            if self.lengths[row] or self.granted[row] or self.num_held[row]
        ]
        found += [
            f"Request {request_id} has {self.lengths[row]} tokens and {self.granted[row]} were granted."
            for request_id, row in self.rows.items()
            if self.lengths[row] > self.granted[row]
        ]
        if self.used_tokens != sum(self.lengths):
            found.append(f"The requests have {sum(self.lengths)} tokens and {self.used_tokens} are counted.")
        return found

    def audit_blocks(self) -> list[str]:
        """What is wrong with blocks and tables, a sentence each; empty for a pool in order, used or not."""
        found = [
            f"Request {request_id} holds {self.num_held[row]} blocks and its grant of {self.granted[row]} tokens fills "
            f"{self.blocks_for(self.granted[row])}."
            for request_id, row in self.rows.items()
            if self.num_held[row] != self.blocks_for(self.granted[row])
        ]
        return found + self.allocator.audit({request_id: self.table(request_id) for request_id in self.rows})

    def view(self, num_heads: int, backend: str | None = None) -> PagedView:
        """See ``CachePoolProtocol``; raises ConfigError if ``flash`` has no kernel for the model's head size."""
        return PagedView(self, num_heads, backend)

    def places(self, request_ids: Sequence[str]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Row of the tables, length and grant of each request; raises CapacityError for one that holds nothing."""
        rows = [self._row(request_id) for request_id in request_ids]
        lengths, granted = [self.lengths[row] for row in rows], [self.granted[row] for row in rows]
        return np.array(rows), np.array(lengths), np.array(granted)

    def _row(self, request_id: str) -> int:
        row = self.rows.get(request_id)
        if row is None:
            raise CapacityError(f"Request {request_id} holds no blocks; reserve some first.")
        return row
