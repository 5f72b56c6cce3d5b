"""The model's view on a GPU of a KV cache of which parts were dropped, in captured steps. Introduced in phase 9.2.

What a compression kept is written once on the device, in the request's row of the pool. From there the kernel of decode
steps (:mod:`shared.tracks.compression.kernels.condensed_attention`) reads which tokens a head has, so a step uploads
no more than in phase 6, and is captured in phase 9's buckets. Compressed or not, all decoding sequences are one
launch. A prompt that was compressed, because a preempted request is computed again, is attended with PyTorch's
operations.

Invariants: those of :class:`shared.tracks.compression.view.CondensedView`; padding belongs to a row that no request
has, which keeps nothing.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from shared.cache.layout.paged import PagedLayout, PagedSizes
from shared.cache.layout.slots import Integers
from shared.cache.view.attention import Arrays, PagedAttentionProtocol, Places, Scores
from shared.cache.view.bucket_padding import OF_TOKENS, BucketPadding
from shared.cache.view.interface import StepInputs
from shared.cache.view.padding import Padding
from shared.cache.view.paged_attention import PagedAttention
from shared.engine.batch import Batch
from shared.engine.executor.buckets import Bucket, Buckets
from shared.models.config import ModelConfig
from shared.models.tokens import QueryKeyTransform
from shared.tracks.compression.compressors import BatchedCompressor
from shared.tracks.compression.head_selection import HeadSelector, Selected, before, num_tiles, sent
from shared.tracks.compression.interface import Place
from shared.tracks.compression.kernels.condensed_attention import KeptTokens, condensed_attention
from shared.tracks.compression.kernels.kept_moves import move_kept
from shared.tracks.compression.kernels.window_mass import TABLE_START
from shared.tracks.compression.layout import Holding, LayoutPacked, Packed, holdings_of, packed_of
from shared.tracks.compression.view import CondensedView


class CondensedAttention(PagedAttentionProtocol):
    """Attention over what is kept; see :class:`shared.cache.view.attention.PagedAttentionProtocol`.

    Args:
        flash: phase 6's attention, of prompts that are not compressed.
        by_cells: of the new tokens of one sequence; see ``CondensedView.attend_by_cells``.
        num_queries: of a row of the ring.
    """

    def __init__(
        self, flash: PagedAttention, kept: KeptTokens, by_cells: Callable[..., Tensor], num_queries: int
    ) -> None:
        self.flash, self.kept, self.by_cells, self.num_queries = flash, kept, by_cells, num_queries
        self.max_sequences = flash.sizes.max_sequences

    def staged(self, is_decode: bool, max_tokens: int) -> Places:
        own = {"ring_places": (max_tokens, np.int64), "rows": (self.max_sequences, np.int32)}
        return own | self.flash.staged(is_decode, max_tokens)

    def arrays(self, batch: Batch, layout: PagedLayout) -> Arrays:
        own = {"ring_places": self._ring_places(batch, layout.rows), "rows": layout.rows[: layout.num_decoding]}
        return self.flash.arrays(batch, layout) | own

    def _ring_places(self, batch: Batch, rows: Integers) -> Integers:
        """Where the query of each token is kept: in its row's ring, or in the padding row."""
        w, num_new = self.num_queries, batch.num_new_tokens
        places = rows.repeat(num_new) * w + batch.positions % w
        if batch.is_decode:
            return places
        num_behind = num_new.cumsum().repeat(num_new) - np.arange(batch.num_tokens)
        return np.where(num_behind <= w, places, self.max_sequences * w)

    def receive(self, batch: Batch, layout: PagedLayout, sent: Mapping[str, Tensor]) -> None:
        self.flash.receive(batch, layout, sent)
        self.rows, self.is_decode = sent["rows"], batch.is_decode
        if not self.is_decode:
            prompts = holdings_of(layout)[layout.num_decoding :]
            self.prompts, self.num_new = prompts, batch.num_new_tokens[layout.num_decoding :].tolist()
            self.is_compressed = any(one.packed is not None for one in prompts)

    def attend(self, layer: int, q: Tensor, about: Scores, out: Tensor | None) -> Tensor:
        if self.is_decode:
            return self._attend_decoding(layer, q, about, cast(Tensor, out))
        n, out = self.flash.num_decoding, torch.empty_like(q, memory_format=torch.contiguous_format)
        if n:
            self._attend_decoding(layer, q[:n], about, out[:n])
        if not self.is_compressed:
            self.flash.attend_prompts(layer, q[n:], about, out[n:])
            return out
        each = zip(q[n:].split(self.num_new), out[n:].split(self.num_new), self.prompts, strict=True)
        for queries, result, sequence in each:
            result.copy_(self.by_cells(layer, queries, sequence, about))
        return out

    def _attend_decoding(self, layer: int, q: Tensor, about: Scores, out: Tensor) -> Tensor:
        storage, workspace = self.flash.storage, self.flash.workspaces[(len(q) - 1).bit_length()]
        memory = (storage.keys, storage.values, *self.flash.decoding, self.rows, self.kept, layer)
        return condensed_attention(q, *memory, **about, workspace=workspace, out=out)


class CondensedBucketView(CondensedView):
    """Keys and values in blocks, of which compressed requests have kept a part; a ``BucketedView`` of the runner.

    Args:
        buckets: of captured decode steps.
        about: the last arguments of :class:`CondensedView`.
    """

    num_padding_rows = 1

    def __init__(
        self,
        config: ModelConfig,
        sizes: PagedSizes,
        dtype: torch.dtype,
        device: torch.device | str,
        buckets: Buckets,
        *about: Any,
    ) -> None:
        self.buckets, self.bucket = replace(buckets, mixed=()), None
        self.paddings = [padding_of(bucket, sizes.max_sequences) for bucket in reversed(buckets.decode)]
        super().__init__(config, sizes, dtype, device, None, *about)
        ends = self.kept.ends
        self.selector: HeadSelector | None = None
        if self.moves and self.budget.reduction in ("mean", "sum") and isinstance(self.compressor, BatchedCompressor):
            windows = torch.tensor([window or 0 for window in config.windows], dtype=torch.int32, device=device)
            where, which = (self.ring, self.keys, ends, windows), (self.compressor, self.budget, config.attention_scale)
            self.selector = HeadSelector(*where, *which)
        self.selected: dict[int, Selected] = {}  # by row, of sequences whose last step is in flight
        self.sent_rows: dict[int, Packed] = {}  # what each row of `kept` says; none: nothing is kept

    def _attention(self, backend: str | None) -> tuple[PagedAttentionProtocol, Padding]:
        config, sizes, device = self.config, self.sizes, self.keys.device
        heads = config.num_layers * config.num_kv_heads
        ends = torch.zeros(sizes.max_sequences + 1, heads + 2, dtype=torch.int32, device=device)
        bits = (sizes.max_sequences + 1, config.num_layers, config.num_kv_heads, -(-sizes.max_seq_len // 8))
        self.kept = KeptTokens(ends, None if self.moves else torch.zeros(bits, dtype=torch.uint8, device=device))
        flash = PagedAttention(config, sizes, self.storage)
        values = {"ring_places": sizes.max_sequences * self.num_queries, "rows": sizes.max_sequences}
        padding = BucketPadding(
            self.buckets,
            self.paddings,
            sizes.block_size,
            config.num_kv_heads * config.head_dim,
            {**OF_TOKENS, "lengths": 0, "table_starts": 0, **values},
            (),
        )
        return CondensedAttention(flash, self.kept, self.attend_by_cells, self.num_queries), padding

    def load(self, batch: Batch) -> StepInputs:
        """See ``BatchView``."""
        layout = cast(PagedLayout, batch.layout)
        for row, packed in zip(layout.rows.tolist(), packed_of(layout), strict=True):
            if (selected := self.selected.pop(row, None)) is not None:  # what is loaded changes
                selected.precede()
            self._send_kept(row, packed)
        inputs = self.paged.load(batch)
        self.bucket, self.ring_places = self.paged.bucket, self.paged.sent["ring_places"]
        return inputs

    def _send_kept(self, row: int, packed: Packed | None) -> None:
        """Tell the device what a row has kept, if that is news."""
        if self.sent_rows.get(row) is packed:
            return
        numbers = np.zeros(self.kept.ends.shape[1], np.int32)
        if packed is not None:
            numbers[-1] = packed.num_slots or packed.num_tokens
            numbers[1:-1] = packed.counts.cumsum() if packed.num_slots else 0
        self.kept.ends[row].copy_(sent(numbers, self.keys.device))
        if packed is None:
            del self.sent_rows[row]
        else:
            self.sent_rows[row] = packed

    def write(self, layer: int, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, qk: QueryKeyTransform) -> Tensor:
        """See :class:`shared.models.tokens.KVView`."""
        q = self.paged.write(layer, q, k, v, positions, qk)
        self.ring[layer].flatten(0, 1).index_copy_(0, self.ring_places, q)
        return q

    def attend(
        self, layer: int, q: Tensor, *, scale: float, window: int | None = None, softcap: float | None = None
    ) -> Tensor:
        """See :class:`shared.models.tokens.KVView`."""
        return self.paged.attend(layer, q, scale=scale, window=window, softcap=softcap)

    def compress(self, sequence: Holding, place: Place) -> Packed | None:
        """See :class:`shared.tracks.compression.interface.CompressingView`."""
        if self.selector is not None:
            return self._compress_all(self.selector, sequence, place)
        packed = super().compress(sequence, place)
        if packed is not None and self.kept.masks is not None:
            mask = self.masks[sequence.row]
            self.kept.masks[sequence.row, ..., : mask.shape[-1]] = mask
        return packed

    def select(self, sequences: Sequence[Holding]) -> None:
        """See :class:`shared.tracks.compression.interface.CompressingView`; those of about one length are one set of
        launches.
        """
        if self.selector is None:
            return
        alike: defaultdict[tuple[int, int], list[Holding]] = defaultdict(list)
        for one in sequences:
            alike[min(self.num_queries, one.num_tail), num_tiles(one).bit_length()].append(one)
        for together in alike.values():
            self.selected |= dict.fromkeys((one.row for one in together), self._select(self.selector, together))

    def _select(self, selector: HeadSelector, sequences: Sequence[Holding]) -> Selected:
        """Choose of sequences whose tails are as long as a window, or equally long."""
        for one in sequences:
            self._send_kept(one.row, one.packed)
        return selector.select(sequences, min(self.num_queries, sequences[0].num_tail))

    def _compress_all(self, selector: HeadSelector, sequence: Holding, place: Place) -> Packed | None:
        """``compress`` for all layers and heads at once; what is kept moves beside the step in flight, and before the
        next one.
        """
        selected = self.selected.pop(sequence.row, None)
        if selected is None or (i := selected.index(sequence)) is None:
            selected, i = self._select(selector, [sequence]), 0
        counts, room = selected.wait(i), selected.room
        packed = Packed(counts, sequence.num_tokens, self.cells.slots_for(counts))
        num_before = counts.size * sequence.num_tail + (0 if sequence.packed is None else sequence.packed.total)
        if num_before - packed.total < self.cells.per_block or (table := place(packed)) is None:
            return None
        known, source = selected.holdings[i].table, sequence.table
        with before(selector.stream):
            if not np.array_equal(source, known):  # the prefix tree had the same blocks
                where = slice(TABLE_START, TABLE_START + len(source))
                room.sequences.numbers[i, where] = sent(source, self.keys.device)
            target = None if np.array_equal(table, source[: len(table)]) else sent(table, self.keys.device)
            kept = room.chosen, room.counts, packed.most, packed.total
            move_kept(self.keys, self.values, room.sequences, i, *kept, target)
        self.sent_rows[sequence.row] = packed
        return packed


def padding_of(bucket: Bucket, max_sequences: int) -> Batch:
    """A batch for the capture of a bucket: new sequences that write to no slot."""
    B, nothing = bucket.num_sequences, np.zeros(0, np.int64)
    places = (np.full(B, max_sequences), np.zeros(B, np.int64), np.ones(B, np.int64), np.full(B, -1))
    layout = PagedLayout(*places, np.zeros(B, np.int32), np.arange(B + 1), extra=LayoutPacked((None,) * B))
    return Batch(
        request_ids=("padding",) * B,
        token_ids=np.zeros(B, np.int64),
        pending=nothing,
        positions=np.zeros(B, np.int64),
        num_new_tokens=np.ones(B, np.int64),
        logit_rows=nothing,
        logit_sequences=nothing,
        layout=layout,
    )
