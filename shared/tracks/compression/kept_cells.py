"""The keys that compressed sequences keep in the KV cache, implemented with PyTorch's operations. Introduced in phase
9.2.

``compress`` runs between two steps: for each layer and head it scores the remaining keys, and then either moves the
selected ones into the first blocks (*condensed*) or marks them in a mask and moves nothing (*masked*,
``if_fake_compress``). A sliding-window layer keeps exactly its window, which loses nothing. The other layers
keep the keys selected by the compressor.

Invariants: a head's tokens are in time order, including its tail; masks only lose bits.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from shared.cache.layout.paged import PagedSizes
from shared.cache.view.attention import Scores
from shared.cache.view.block_storage import BlockStorage
from shared.models.config import ModelConfig
from shared.ops.attention import visible
from shared.tracks.compression.compressors import Compressor
from shared.tracks.compression.interface import AllocateKept
from shared.tracks.compression.layout import Cells, Holding, Packed
from shared.tracks.compression.query_ring import QueryRing
from shared.tracks.compression.selection import Budget, select


class KeptCells:
    """Keys and values, addressed by cells.

    Args:
        dtype: the model's dtype.
        num_queries: ``query_window_size``, how many of a sequence's last queries compressors see.
        moves: whether kept tokens are moved together; otherwise the others are masked.
    """

    def __init__(
        self,
        config: ModelConfig,
        sizes: PagedSizes,
        dtype: torch.dtype,
        storage: BlockStorage,
        compressor: Compressor,
        budget: Budget,
        num_queries: int,
        moves: bool,
    ) -> None:
        self.config, self.compressor, self.budget, self.moves = config, compressor, budget, moves
        self.keys, self.values = (x.view(-1, config.head_dim) for x in (storage.keys, storage.values))
        self.cells = Cells.of(config, sizes)
        self.ring = QueryRing(config, sizes.max_sequences, num_queries, dtype, storage.keys.device)
        self.packed_cells: dict[int, tuple[Packed, np.ndarray, np.ndarray]] = {}  # by row
        self.masks: dict[int, Tensor] = {}  # by row: uint8 [layers, Hkv, ceil(n / 8)], from the last compression

    def attend(self, layer: int, queries: Tensor, sequence: Holding, options: Scores) -> Tensor:
        """Attention of the new tokens of one sequence."""
        cells, kept = self.cells_of(sequence, layer)
        return masked_attention(queries, self.keys[cells], self.values[cells], kept, **options)

    def cells_of(self, sequence: Holding, layer: int) -> tuple[Tensor, Tensor]:
        """A layer's cells in time order, int64 [Hkv, S], and which of them are kept, bool [Hkv, S].

        Heads of a condensed part are aligned at their newest token, so padding comes first and is not kept.
        """
        packed, device = sequence.packed, self.keys.device
        tail = np.arange(sequence.num_packed_slots, sequence.length)
        cells = self.cells.plain(layer, tail, sequence.table)
        kept = torch.ones(cells.shape, dtype=torch.bool, device=device)
        if packed is not None and packed.num_slots:
            first, is_kept = (of_all[layer] for of_all in self._packed_cells(sequence))
            cells = np.concatenate([first, cells], 1)
            kept = torch.cat([torch.from_numpy(is_kept).to(device), kept], 1)
        elif packed is not None:
            kept[:, : packed.num_tokens] = unpack(self.masks[sequence.row][layer], packed.num_tokens)
        return torch.from_numpy(cells).to(device), kept

    def _packed_cells(self, sequence: Holding) -> tuple[np.ndarray, np.ndarray]:
        """Like :meth:`cells_of`, for the condensed part of all layers; unchanged until the next compression."""
        packed, known = sequence.packed, self.packed_cells.get(sequence.row)
        assert packed is not None
        if known is None or known[0] is not packed:
            counts = packed.counts[:, :, None]
            ends = packed.counts.cumsum().reshape(counts.shape)  # past the last one of each head
            back = np.arange(counts.max(), 0, -1)  # distance from the end
            known = packed, self.cells.packed(np.maximum(ends - back, 0), sequence.table), back <= counts
            self.packed_cells[sequence.row] = known
        return known[1:]

    def cells_together(self, sequences: Sequence[Holding]) -> tuple[Tensor, Tensor]:
        """Like :meth:`cells_of`, [layers, B, Hkv, S], for condensed sequences of a decode step."""
        layers, parts = np.arange(self.cells.num_layers)[:, None, None], []
        for one in sequences:
            tail = self.cells.plain(layers, np.arange(one.num_packed_slots, one.length), one.table)
            parts.append((*self._packed_cells(one), tail))
        S = max(first.shape[-1] + tail.shape[-1] for first, _, tail in parts)
        cells = np.zeros((len(layers), len(parts), self.cells.num_kv_heads, S), np.int64)
        kept = np.zeros(cells.shape, np.bool_)
        for b, (first, is_kept, tail) in enumerate(parts):
            end = S - tail.shape[-1]
            packed = slice(end - first.shape[-1], end)
            cells[:, b, :, packed], kept[:, b, :, packed] = first, is_kept
            cells[:, b, :, end:], kept[:, b, :, end:] = tail, True
        return torch.from_numpy(cells).to(self.keys.device), torch.from_numpy(kept).to(self.keys.device)

    def compress(self, sequence: Holding, allocate: AllocateKept) -> Packed | None:
        """See :class:`shared.tracks.compression.interface.CompressingAttention`."""
        chosen = [self._choose(sequence, layer) for layer in range(self.cells.num_layers)]
        counts = torch.stack([kept.sum(1) for _, kept, _ in chosen]).cpu().numpy().astype(np.int64)
        num_dropped = sum(int(before.sum()) for *_, before in chosen) - int(counts.sum())
        if num_dropped < self.cells.per_block:
            return None
        if not self.moves:
            self.masks[sequence.row] = pack(torch.stack([kept for _, kept, _ in chosen]))
        packed = Packed(counts, sequence.num_tokens, self.cells.slots_for(counts) if self.moves else 0)
        table = allocate(packed)
        if table is None or not self.moves:
            return None if table is None else packed
        sources = torch.cat([cells[kept] for cells, kept, _ in chosen])  # head after head, in time order
        targets = torch.from_numpy(self.cells.packed(np.arange(len(sources)), table)).to(self.keys.device)
        for cells in (self.keys, self.values):
            cells[targets] = cells[sources]  # read completely before the first is written
        return packed

    def _choose(self, sequence: Holding, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """A layer's cells, which of them it keeps from now on, and which it has kept so far, [Hkv, S] each."""
        cells, before = self.cells_of(sequence, layer)
        window = self.config.windows[layer]
        if window is not None:
            kept = before.clone()
            kept[:, : max(0, kept.shape[1] - window)] = False
            return cells, kept, before
        # Causality within the query window goes by index, so its keys must be present: the window begins no earlier
        # than the tail.
        queries = self.ring.last(layer, sequence.row, sequence.num_tokens, min(self.ring.length, sequence.num_tail))
        kept, group = torch.zeros_like(before), queries.shape[1] // self.cells.num_kv_heads
        for head, columns in enumerate(before):  # heads have different lengths
            mine = self.keys[cells[head, columns]][:, None]  # [n, 1, D]
            of_head = queries[:, head * group : (head + 1) * group]
            kept[head, columns] = select(of_head, mine, self.compressor, self.budget, self.config.attention_scale)[0]
        return cells, kept, before


def masked_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kept: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Like :func:`shared.ops.attention.naive_attention`, over the keys that are ``kept``, bool ``[Hkv, S]``."""
    T, Hq, D = q.shape
    Hkv, S, _ = k.shape
    scores = torch.einsum("thgd,hsd->hgts", q.view(T, Hkv, Hq // Hkv, D), k).float() * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    seen = visible(T, S, window, q.device) & kept[:, None, None]
    weights = scores.masked_fill(~seen, float("-inf")).softmax(dim=-1).to(q.dtype)
    return torch.einsum("hgts,hsd->thgd", weights, v).reshape(T, Hq, D)


def pack(kept: Tensor) -> Tensor:
    """bool [..., n] -> uint8 [..., ceil(n / 8)]; bit j of byte b is slot 8 b + j."""
    padded = torch.nn.functional.pad(kept, (0, -kept.shape[-1] % 8)).unflatten(-1, (-1, 8))
    return (padded << torch.arange(8, device=kept.device)).sum(-1).to(torch.uint8)


def unpack(mask: Tensor, n: int) -> Tensor:
    """uint8 [..., ceil(n / 8)] -> bool [..., n]."""
    return (mask[..., None] >> torch.arange(8, device=mask.device) & 1).flatten(-2)[..., :n].bool()
