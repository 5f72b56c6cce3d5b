"""Attention over blocks with PyTorch's operations. Introduced in phase 6.

``sdpa``, ``naive``, and everything on a CPU, need a sequence's keys contiguous. For them one operation gathers each
sequence's blocks into a small buffer. A sliding-window layer gathers only the window's blocks. Invariant: a step is
divided into pieces once per window, and all layers use these pieces.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shared.cache.layout.paged import PagedLayout
from shared.cache.view.attention import PagedAttentionProtocol, Scores
from shared.cache.view.block_storage import BlockStorage, KeysAndValues
from shared.engine.batch import Batch
from shared.ops.attention import ATTENTION_BACKENDS


@dataclass(frozen=True)
class Piece:
    """The keys that a sequence attends over: tokens ``start`` to ``end`` of the gathered ``blocks``."""

    blocks: Tensor  # int64
    start: int
    end: int


class OperationsAttention(PagedAttentionProtocol):
    """One call for each sequence; see :class:`shared.cache.view.attention.PagedAttentionProtocol`."""

    def __init__(self, storage: BlockStorage, backend: str) -> None:
        self.storage, self.block_size = storage, storage.keys.shape[2]
        self.operation = ATTENTION_BACKENDS[backend]
        storage.make_readable()

    def receive(self, batch: Batch, layout: PagedLayout, sent: Mapping[str, Tensor]) -> None:
        self.layout, self.num_new = layout, batch.num_new_tokens.tolist()
        self.known: dict[int | None, list[Piece]] = {}  # by window

    def attend(self, layer: int, q: Tensor, options: Scores, out: Tensor | None) -> Tensor:
        """A sliding-window layer reads only keys inside the window."""
        attended = []
        for queries, piece in zip(q.split(self.num_new), self.pieces(options["window"]), strict=True):
            k, v = self.read(layer, piece)
            k, v = k.transpose(0, 1), v.transpose(0, 1)  # [Hkv, S, D]
            attended.append(self.operation(queries, k, v, **options))
        return torch.cat(attended)

    def read(self, layer: int, piece: Piece) -> KeysAndValues:
        """The keys and values of a piece: ``[S, Hkv, D]`` each, valid until the next piece."""
        k, v = self.storage.read(layer, piece.blocks)
        return k[piece.start : piece.end], v[piece.start : piece.end]

    def pieces(self, window: int | None) -> list[Piece]:
        """The keys that each sequence attends over, for all layers of this window."""
        if window not in self.known:
            self.known[window] = self._cut(window)
        return self.known[window]

    def _cut(self, window: int | None) -> list[Piece]:
        layout, size, pieces = self.layout, self.block_size, []
        columns = (layout.num_cached.tolist(), layout.lengths.tolist(), layout.table_starts.tolist()[:-1])
        for num_cached, end, start in zip(*columns, strict=True):
            # the first key that the first new token attends to
            first = 0 if window is None else max(0, num_cached + 1 - window)
            first_block = first // size
            blocks = layout.tables[start + first_block : start - (-end // size)].astype(np.int64)
            skipped = first_block * size
            pieces.append(Piece(torch.from_numpy(blocks).to(self.storage.keys.device), first - skipped, end - skipped))
        return pieces
