"""The model's view of a KV cache of which parts were dropped. Introduced in phase 9.2.

The view keeps the last queries of each sequence and layer in a ring, since they say which keys matter. ``compress``
runs between two steps: for each layer and head it scores the keys that are left, and then either moves those that it
keeps into the first blocks (*condensed*), or marks them in a mask and moves nothing (*masked*, ``if_fake_compress``).

A layer with a sliding window keeps exactly its window, which loses nothing. The other layers keep what the compressor
selects. Compressed sequences are attended with PyTorch's operations: in a decode step of such sequences together, else
one at a time.

A step is loaded, written and, without compressed sequences, attended by a :class:`shared.cache.view.paged.PagedView`.

Invariants: those of that view; a head's tokens are in time order, its tail included;
masks only lose bits; the queries of a token have one place in the ring, so a step can be run again.
"""

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from shared.cache.layout.paged import PagedLayout, PagedSizes
from shared.cache.layout.slots import ranges
from shared.cache.view.attention import PagedAttentionProtocol
from shared.cache.view.block_storage import PlainStorage
from shared.cache.view.interface import StepInputs
from shared.cache.view.padding import NoPadding, Padding
from shared.cache.view.paged import PagedView
from shared.cache.view.paged_attention import paged_or_operations
from shared.engine.batch import Batch
from shared.models.config import ModelConfig
from shared.models.tokens import QueryKeyTransform
from shared.tracks.compression.calibration import pack, unpack
from shared.tracks.compression.compressors import Compressor
from shared.tracks.compression.interface import Place
from shared.tracks.compression.layout import Cells, Holding, Packed, holdings_of
from shared.tracks.compression.masked import masked_attention
from shared.tracks.compression.selection import Budget, select


class CondensedView:
    """Keys and values in blocks, of which compressed requests have kept a part; see ``BatchView``.

    Args:
        num_queries: the last queries of a sequence that compressors see, ``query_window_size``.
        moves: whether kept tokens move together; otherwise they are masked.
    """

    num_padding_rows = 0  # of the ring, behind those of the sequences

    def __init__(
        self,
        config: ModelConfig,
        sizes: PagedSizes,
        dtype: torch.dtype,
        device: torch.device | str,
        backend: str | None,
        compressor: Compressor,
        budget: Budget,
        num_queries: int,
        moves: bool,
    ) -> None:
        self.config, self.sizes = config, sizes
        self.compressor, self.budget, self.num_queries, self.moves = compressor, budget, num_queries, moves
        self.storage = PlainStorage(config, sizes, dtype, device)
        self.keys, self.values, self.num_bytes = self.storage.keys, self.storage.values, self.storage.num_bytes
        self.cells = Cells(config.num_layers, sizes.num_blocks, sizes.block_size, config.num_kv_heads)
        self.key_cells, self.value_cells = (x.view(-1, config.head_dim) for x in (self.keys, self.values))
        self.paged = PagedView(config, sizes, dtype, self.storage, *self._attention(backend))
        rows = sizes.max_sequences + self.num_padding_rows
        shape = (config.num_layers, rows, num_queries, config.num_heads, config.head_dim)
        self.ring = torch.zeros(shape, dtype=dtype, device=device)
        self.packed_cells: dict[int, tuple[Packed, np.ndarray, np.ndarray]] = {}  # by row
        self.masks: dict[int, Tensor] = {}  # by row: uint8 [layers, Hkv, ceil(n / 8)], of the last compression

    def _attention(self, backend: str | None) -> tuple[PagedAttentionProtocol, Padding]:
        """Of steps without compressed sequences, and the padding of all."""
        return paged_or_operations(self.config, self.sizes, self.storage, backend or "sdpa"), NoPadding()

    def load(self, batch: Batch) -> StepInputs:
        inputs = self.paged.load(batch)
        layout, w = cast(PagedLayout, batch.layout), self.num_queries
        kept = np.minimum(batch.num_new_tokens, w)  # the queries of each sequence that stay in the ring
        tokens = ranges(batch.num_new_tokens.cumsum() - kept, kept)
        places = layout.rows.repeat(kept) * w + batch.positions[tokens] % w
        self.ring_tokens, self.ring_places = (torch.from_numpy(x).to(self.keys.device) for x in (tokens, places))
        self.sequences, self.num_new = holdings_of(layout), batch.num_new_tokens.tolist()
        self.is_compressed = any(one.packed is not None for one in self.sequences)
        self.is_together = batch.is_decode and all(one.num_packed_slots for one in self.sequences)
        self.together: tuple[Tensor, Tensor] | None = None
        return inputs

    def write(self, layer: int, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, qk: QueryKeyTransform) -> Tensor:
        q = self.paged.write(layer, q, k, v, positions, qk)
        self.ring[layer].flatten(0, 1).index_copy_(0, self.ring_places, q[self.ring_tokens])
        return q

    def attend(
        self, layer: int, q: Tensor, *, scale: float, window: int | None = None, softcap: float | None = None
    ) -> Tensor:
        if not self.is_compressed:
            return self.paged.attend(layer, q, scale=scale, window=window, softcap=softcap)
        about: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap}
        if self.is_together:  # (sequence, KV head) are heads of one token
            self.together = self.together or self._cells_together()
            cells, kept = (of_all[layer].flatten(0, 1) for of_all in self.together)
            k, v = (
                x.index_select(0, cells.flatten()).view(*cells.shape, -1) for x in (self.key_cells, self.value_cells)
            )
            return masked_attention(q.reshape(1, -1, q.shape[-1]), k, v, kept, **about).view_as(q)
        each = zip(q.split(self.num_new), self.sequences, strict=True)
        return torch.cat([self.attend_by_cells(layer, queries, sequence, about) for queries, sequence in each])

    def attend_by_cells(self, layer: int, queries: Tensor, sequence: Holding, about: dict[str, Any]) -> Tensor:
        """Attention of the new tokens of one sequence; ``about`` holds scale, window and softcap."""
        cells, kept = self.cells_of(sequence, layer)
        return masked_attention(queries, self.key_cells[cells], self.value_cells[cells], kept, **about)

    def cells_of(self, sequence: Holding, layer: int) -> tuple[Tensor, Tensor]:
        """A layer's cells in time order, int64 [Hkv, S], and which of them are kept, bool [Hkv, S].

        Heads of a condensed part are aligned at their newest token, so padding comes first and is not kept.
        """
        packed, device = sequence.packed, self.keys.device
        tail = np.arange(sequence.num_packed_slots, sequence.length)
        cells = self.cells.plain(layer, tail, sequence.table)
        kept = torch.ones(cells.shape, dtype=torch.bool, device=device)
        if packed is None:
            return torch.from_numpy(cells).to(device), kept
        if not packed.num_slots:
            kept[:, : packed.num_tokens] = unpack(self.masks[sequence.row][layer], packed.num_tokens)
            return torch.from_numpy(cells).to(device), kept
        first, is_kept = (of_all[layer] for of_all in self._packed_cells(sequence.row, sequence.table, packed))
        both = np.concatenate([first, cells], 1)
        return torch.from_numpy(both).to(device), torch.cat([torch.from_numpy(is_kept).to(device), kept], 1)

    def _packed_cells(self, row: int, table: np.ndarray, packed: Packed) -> tuple[np.ndarray, np.ndarray]:
        """As :meth:`cells_of` for the condensed part, of all layers; it is the same until the next compression."""
        known = self.packed_cells.get(row)
        if known is None or known[0] is not packed:
            counts = packed.counts[:, :, None]
            ends = packed.counts.cumsum().reshape(counts.shape)  # behind the last of each head
            back = np.arange(counts.max(), 0, -1)  # how far from the end
            known = packed, self.cells.packed(np.maximum(ends - back, 0), table), back <= counts
            self.packed_cells[row] = known
        return known[1:]

    def _cells_together(self) -> tuple[Tensor, Tensor]:
        """As :meth:`cells_of`, [layers, B, Hkv, S], for the compressed sequences of a decode step."""
        layers, parts = np.arange(self.cells.num_layers)[:, None, None], []
        for one in self.sequences:
            assert one.packed is not None
            tail = self.cells.plain(layers, np.arange(one.num_packed_slots, one.length), one.table)
            parts.append((*self._packed_cells(one.row, one.table, one.packed), tail))
        S = max(first.shape[-1] + tail.shape[-1] for first, _, tail in parts)
        cells = np.zeros((len(layers), len(parts), self.cells.num_kv_heads, S), np.int64)
        kept = np.zeros(cells.shape, np.bool_)
        for b, (first, is_kept, tail) in enumerate(parts):
            end = S - tail.shape[-1]
            packed = slice(end - first.shape[-1], end)
            cells[:, b, :, packed], kept[:, b, :, packed] = first, is_kept
            cells[:, b, :, end:], kept[:, b, :, end:] = tail, True
        return torch.from_numpy(cells).to(self.keys.device), torch.from_numpy(kept).to(self.keys.device)

    def select(self, sequences: Sequence[Holding]) -> None:
        """See :class:`shared.tracks.compression.interface.CompressingView`; here ``compress`` does everything."""

    def compress(self, sequence: Holding, place: Place) -> Packed | None:
        """See :class:`shared.tracks.compression.interface.CompressingView`."""
        chosen = [self._choose(sequence, layer) for layer in range(self.cells.num_layers)]
        counts = torch.stack([kept.sum(1) for _, kept, _ in chosen]).cpu().numpy().astype(np.int64)
        num_dropped = sum(int(before.sum()) for *_, before in chosen) - int(counts.sum())
        if num_dropped < self.cells.per_block:
            return None
        if not self.moves:
            self.masks[sequence.row] = pack(torch.stack([kept for _, kept, _ in chosen]))
        packed = Packed(counts, sequence.num_tokens, self.cells.slots_for(counts) if self.moves else 0)
        table = place(packed)
        if table is None or not self.moves:
            return None if table is None else packed
        sources = torch.cat([cells[kept] for cells, kept, _ in chosen])  # head after head, in time order
        targets = torch.from_numpy(self.cells.packed(np.arange(len(sources)), table)).to(self.keys.device)
        for cells in (self.key_cells, self.value_cells):
            cells[targets] = cells[sources]  # read as a whole before the first is written
        return packed

    def _choose(self, sequence: Holding, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """A layer's cells, which of them it keeps from now on, and which it kept so far, [Hkv, S] each."""
        cells, before = self.cells_of(sequence, layer)
        window = self.config.windows[layer]
        if window is not None:
            kept = before.clone()
            kept[:, : max(0, kept.shape[1] - window)] = False
            return cells, kept, before
        # Causality inside the window of queries is by index, so its keys must be there: no older than the tail.
        w = min(self.num_queries, sequence.num_tail)
        places = torch.arange(-w, 0, device=self.keys.device).add(sequence.num_tokens) % self.num_queries
        queries = self.ring[layer, sequence.row, places]  # [w, Hq, D]
        kept, group = torch.zeros_like(before), queries.shape[1] // self.cells.num_kv_heads
        for head, columns in enumerate(before):  # heads have different lengths
            mine = self.key_cells[cells[head, columns]][:, None]  # [n, 1, D]
            of_head = queries[:, head * group : (head + 1) * group]
            kept[head, columns] = select(of_head, mine, self.compressor, self.budget, self.config.attention_scale)[0]
        return cells, kept, before
