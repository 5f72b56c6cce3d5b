"""Blocks as the model sees them during a step. Introduced in phase 6.

What differs from step to step, the block tables, the new tokens' places, the lengths, is worked out once in numpy, sent
in one copy, and read by all layers. With ``flash`` a layer is two launches, whatever the step brings: ``kv_write``, and
``paged_attention`` where every sequence brings one token, else ``paged_prefill``. The tables travel end to end, so a
step sends the blocks that are read and not the widest table times the batch; they come last, so that everything before
them has the same address in every step of as many sequences.

PyTorch's operations (``sdpa``, ``naive``, and everything on a CPU) want a sequence's keys in one piece. There each
sequence's blocks are gathered by one operation into one small piece of memory, which all sequences and layers use in
turn: it stays in the processor's caches, so to read it once more costs little, and less than to gather all sequences at
once. Of a windowed layer only the window's blocks are gathered.

Invariants: a step writes behind the tokens that the pool has counted and counts none itself, so a step that fails can
be run again; what :meth:`PagedView.write` and ``attend`` give in a decode step is the view's own memory, good until the
next layer's call, at the same addresses for the same number of sequences.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from shared.cache.fused_contiguous import check_flash_head_size
from shared.engine.batch import Batch
from shared.engine.staging import Staging
from shared.errors import CapacityError
from shared.kernels.decode_attention import DecodeWorkspace
from shared.kernels.kv_write import NormAndRotation, kv_write
from shared.kernels.launch import launches
from shared.kernels.paged_attention import paged_attention
from shared.kernels.paged_prefill import paged_prefill
from shared.models.tokens import QueryKeyTransform, Tokens
from shared.ops.attention import ATTENTION_BACKENDS

if TYPE_CHECKING:
    from shared.cache.paged import PagedKVCachePool


@dataclass(frozen=True)
class Piece:
    """What a sequence's new tokens attend over: the tokens ``start`` to ``end`` of so many blocks, gathered."""

    blocks: torch.Tensor  # int64
    start: int
    end: int


class PagedView:
    """A pool of blocks behind the model; see ``BatchView``. Raises ConfigError as ``PagedKVCachePool.view``."""

    def __init__(self, pool: "PagedKVCachePool", num_heads: int, backend: str | None = None) -> None:
        backend = backend or "flash"
        self.pool = pool
        self.attention = ATTENTION_BACKENDS["sdpa" if backend == "flash" else backend]
        self.is_launching = launches(pool.keys)
        self.is_flash = self.is_launching and backend == "flash"
        device, dtype = pool.keys.device, pool.keys.dtype
        self.staging = Staging(device)
        num_layers, num_blocks, self.block_size, self.num_kv_heads, self.head_dim = pool.keys.shape
        self.token_stride = self.num_kv_heads * self.head_dim
        self.layer_keys, self.layer_values = pool.keys.unbind(0), pool.values.unbind(0)
        if self.is_launching:
            self.queries = torch.empty(pool.max_sequences, num_heads, self.head_dim, dtype=dtype, device=device)
            self.attended = torch.empty_like(self.queries)
        else:
            self.key_rows = pool.keys.view(num_layers, -1, self.token_stride).unbind(0)
            self.value_rows = pool.values.view(num_layers, -1, self.token_stride).unbind(0)
        if self.is_flash:
            check_flash_head_size(self.head_dim)
            self._make_workspaces(num_heads)
        else:
            self.key_blocks = pool.keys.view(num_layers, num_blocks, -1).unbind(0)
            self.value_blocks = pool.values.view(num_layers, num_blocks, -1).unbind(0)
            self.gathered = torch.empty(2, 0, dtype=dtype, device=device)

    def _make_workspaces(self, num_heads: int) -> None:
        """For 1, 2, 4, … sequences: the fewer there are, the more programs share one."""
        about = (num_heads, self.num_kv_heads, self.head_dim, self.pool.request_capacity, self.pool.keys.device)
        self.workspaces = [
            DecodeWorkspace.of(1 << n, *about) for n in range((self.pool.max_sequences - 1).bit_length() + 1)
        ]

    def prepare(self, batch: Batch) -> tuple[Tokens, torch.Tensor]:
        """See ``BatchView``; raises CapacityError for tokens that were not granted."""
        pool, num_new = self.pool, batch.num_new_tokens
        self.is_decode = batch.num_tokens == len(num_new)
        rows, past, granted = pool.places(batch.request_ids)  # [B] each
        ends = past + num_new
        if (ends > granted).any():
            raise CapacityError(f"The step would fill {ends.tolist()} tokens of {granted.tolist()} that were granted.")
        places, token_rows = past, rows  # of each new token: its place in its sequence, its sequence's row
        if not self.is_decode:
            first_rows = num_new.cumsum() - num_new
            places = np.repeat(past - first_rows, num_new) + np.arange(batch.num_tokens)  # [T]
            token_rows = np.repeat(rows, num_new)
        # exercise 06.5: look it up in the block table
        # hint: the token at place t of its sequence stands in entry t // block_size of that sequence's table
        # hint: pool.tables has a row for each sequence: index it with token_rows and with the entries, both [T]
        # hint: within its block it stands at place t % block_size; block b begins at slot b * block_size
        # hint: tables are int32; make the blocks int64 before you multiply, and name the result slot_mapping
        blocks = pool.tables[token_rows, places // self.block_size].astype(np.int64)
        slot_mapping = blocks * self.block_size + places % self.block_size  # [T]
        # end exercise
        offsets = slot_mapping * self.token_stride if self.is_launching else slot_mapping
        arrays: list[NDArray[Any]] = [batch.token_ids, batch.positions, batch.logit_rows, offsets]
        if self.is_flash:
            arrays += self._kernel_arrays(rows, ends, num_new)
        ids, positions, logit_rows, self.offsets, *plan = self.staging.send(arrays)
        if self.is_launching and self.is_decode:  # what every layer's results are stored in
            self.step_queries, self.step_attended = self.queries[: len(num_new)], self.attended[: len(num_new)]
        if self.is_flash:
            self._receive(plan)
        else:
            self.sequences = list(zip(rows.tolist(), past.tolist(), ends.tolist(), strict=True))
            self.num_new = num_new.tolist()
            self.pieces: dict[int | None, list[Piece]] = {}  # by window
        return Tokens(ids, positions), logit_rows

    def _kernel_arrays(
        self, rows: NDArray[np.int64], ends: NDArray[np.int64], num_new: NDArray[np.int64]
    ) -> list[NDArray[np.int32]]:
        """Lengths ``[B]``, where each table begins ``[B]``, where each one's new tokens do ``[B + 1]``, the tables."""
        num_blocks = -(-ends // self.block_size)
        starts = num_blocks.cumsum() - num_blocks
        rows_before = rows * self.pool.tables.shape[1] - starts
        entries = np.repeat(rows_before, num_blocks) + np.arange(starts[-1] + num_blocks[-1])  # of the flat tables
        tables = self.pool.tables.reshape(-1)[entries]
        query_starts = np.append(0, num_new.cumsum())
        return [ends.astype(np.int32), starts.astype(np.int32), query_starts.astype(np.int32), tables]

    def _receive(self, sent: Sequence[torch.Tensor]) -> None:
        """Keep what became of the arrays that ``_kernel_arrays`` gave, in that order."""
        self.lengths, self.table_starts, self.query_starts, self.tables = sent

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
        if not self.is_launching:
            q, k = qk(q, k, positions)
            self.key_rows[layer].index_copy_(0, self.offsets, k.reshape(-1, self.token_stride))
            self.value_rows[layer].index_copy_(0, self.offsets, v.reshape(-1, self.token_stride))
            return q
        return kv_write(
            q,
            k,
            v,
            positions,
            cast(NormAndRotation, qk),
            self.layer_keys[layer],
            self.layer_values[layer],
            self.offsets,
            self.head_dim,
            out=self.step_queries if self.is_decode else None,
        )

    def attend(
        self, layer: int, q: torch.Tensor, *, scale: float, window: int | None = None, softcap: float | None = None
    ) -> torch.Tensor:
        """See :class:`shared.models.tokens.KVView`; of a windowed layer only what a new token can see is read."""
        if not self.is_flash:
            return self._attend_gathered(layer, q, scale, window, softcap)
        memory = (self.layer_keys[layer], self.layer_values[layer], self.tables, self.table_starts, self.lengths)
        if not self.is_decode:
            return paged_prefill(q, *memory, self.query_starts, scale=scale, window=window, softcap=softcap)
        return paged_attention(
            q,
            *memory,
            scale=scale,
            window=window,
            softcap=softcap,
            workspace=self.workspaces[(q.shape[0] - 1).bit_length()],
            out=self.step_attended,
        )

    def _attend_gathered(
        self, layer: int, q: torch.Tensor, scale: float, window: int | None, softcap: float | None
    ) -> torch.Tensor:
        if window not in self.pieces:
            self.pieces[window] = self._cut(window)
        attended = []
        for queries, piece in zip(q.split(self.num_new), self.pieces[window], strict=True):
            count = len(piece.blocks) * self.block_size * self.token_stride
            k, v = (part[:count].view(len(piece.blocks), -1) for part in self.gathered)
            torch.index_select(self.key_blocks[layer], 0, piece.blocks, out=k)
            torch.index_select(self.value_blocks[layer], 0, piece.blocks, out=v)
            k, v = (
                x.view(-1, self.num_kv_heads, self.head_dim)[piece.start : piece.end].transpose(0, 1) for x in (k, v)
            )  # [Hkv, S, D]
            attended.append(self.attention(queries, k, v, scale=scale, window=window, softcap=softcap))
        return torch.cat(attended)

    def _cut(self, window: int | None) -> list[Piece]:
        """What each sequence's new tokens can see, for all layers of this window."""
        pieces, largest = [], 0
        for row, past, end in self.sequences:
            first = 0 if window is None else max(0, past + 1 - window)  # the first that the first new token sees
            first_block = first // self.block_size
            blocks = self.pool.tables[row, first_block : -(-end // self.block_size)].astype(np.int64)
            largest = max(largest, len(blocks) * self.block_size * self.token_stride)
            skipped = first_block * self.block_size
            pieces.append(Piece(torch.from_numpy(blocks).to(self.gathered.device), first - skipped, end - skipped))
        if largest > self.gathered.shape[1]:
            self.gathered = self.gathered.new_empty(2, 1 << (largest - 1).bit_length())
        return pieces
