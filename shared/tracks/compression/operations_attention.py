"""Attention over a compressed KV cache, with PyTorch's operations. Introduced in phase 9.2.

Steps without compressed sequences use the plain attention. Compressed sequences attend to their cells: together in a
decode step of compressed sequences only, otherwise one at a time.

Invariants: those of :mod:`shared.tracks.compression.kept_cells`; a step's queries are in the ring before the step ends.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from shared.cache.layout.paged import PagedLayout
from shared.cache.view.attention import Arrays, ArraySpecs, PagedAttentionProtocol, Scores
from shared.engine.batch import Batch
from shared.tracks.compression.interface import AllocateKept
from shared.tracks.compression.kept_cells import KeptCells, masked_attention
from shared.tracks.compression.layout import Holding, Packed, holdings_of


class CondensedOperations(PagedAttentionProtocol):
    """A ``PagedAttentionProtocol``, and a ``CompressingAttention``.

    Args:
        plain: the attention for steps without compressed sequences.
    """

    def __init__(self, plain: PagedAttentionProtocol, kept: KeptCells) -> None:
        self.plain, self.kept = plain, kept

    def staged(self, is_decode: bool, max_tokens: int) -> ArraySpecs:
        return {"ring_slots": (max_tokens, np.int64), **self.plain.staged(is_decode, max_tokens)}

    def arrays(self, batch: Batch, layout: PagedLayout) -> Arrays:
        return {"ring_slots": self.kept.ring.slots(batch), **self.plain.arrays(batch, layout)}

    def receive(self, batch: Batch, layout: PagedLayout, sent: Mapping[str, Tensor]) -> None:
        self.plain.receive(batch, layout, sent)
        self.ring_slots = sent["ring_slots"]
        self.sequences, self.num_new = holdings_of(layout), batch.num_new_tokens.tolist()
        self.is_compressed = any(one.packed is not None for one in self.sequences)
        self.is_together = batch.is_decode and all(one.num_packed_slots for one in self.sequences)
        self.together: tuple[Tensor, Tensor] | None = None

    def attend(self, layer: int, q: Tensor, options: Scores, out: Tensor | None) -> Tensor:
        kept = self.kept
        kept.ring.keep(layer, q, self.ring_slots)
        if not self.is_compressed:
            return self.plain.attend(layer, q, options, out)
        if self.is_together:  # (sequence, KV head) pairs act as heads of one token
            self.together = self.together or kept.cells_together(self.sequences)
            cells, is_kept = (of_all[layer].flatten(0, 1) for of_all in self.together)
            k, v = (x.index_select(0, cells.flatten()).view(*cells.shape, -1) for x in (kept.keys, kept.values))
            return masked_attention(q.reshape(1, -1, q.shape[-1]), k, v, is_kept, **options).view_as(q)
        each = zip(q.split(self.num_new), self.sequences, strict=True)
        return torch.cat([kept.attend(layer, queries, sequence, options) for queries, sequence in each])

    def select(self, sequences: Sequence[Holding]) -> None:
        """``compress`` does everything."""

    def compress(self, sequence: Holding, allocate: AllocateKept) -> Packed | None:
        return self.kept.compress(sequence, allocate)
