"""Attention on a GPU over a compressed KV cache, in captured steps. Introduced in phase 9.2.

After a compression, the layout of the kept tokens is written to the device once, in the request's row of the pool. The
decode kernel (:mod:`shared.tracks.compression.kernels.condensed_attention`) looks up each head's tokens there, so a
step uploads no more than in phase 6 and is captured in phase 9's buckets. One launch serves all decoding sequences,
compressed or not. When a preempted request is recomputed, its compressed prompt uses PyTorch's operations.

Invariants: those of :mod:`shared.tracks.compression.kept_cells`; padding uses a row of its own, which keeps nothing.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import cast

import numpy as np
import torch
from torch import Tensor

from shared.cache.layout.bucket_planner import padding_batch
from shared.cache.layout.paged import PagedLayout, PagedSizes
from shared.cache.view.attention import Arrays, ArraySpecs, PagedAttentionProtocol, Scores
from shared.cache.view.block_storage import BlockStorage
from shared.cache.view.bucket_padding import OF_TOKENS, BucketPadding
from shared.cache.view.paged_attention import PagedAttention
from shared.engine.batch import Batch
from shared.engine.executor.buckets import Buckets
from shared.models.config import ModelConfig
from shared.tracks.compression.compressors import BatchedCompressor
from shared.tracks.compression.head_selection import HeadSelector, Selected, before, num_tiles, sent
from shared.tracks.compression.interface import AllocateKept
from shared.tracks.compression.kept_cells import KeptCells
from shared.tracks.compression.kernels.condensed_attention import KeptTokens, condensed_attention
from shared.tracks.compression.kernels.kept_moves import move_kept
from shared.tracks.compression.kernels.window_mass import TABLE_START
from shared.tracks.compression.layout import Holding, LayoutPacked, Packed, holdings_of, packed_of


class CondensedKernels(PagedAttentionProtocol):
    """Attention over kept keys by kernels; a ``PagedAttentionProtocol``, and a ``CompressingAttention``. ``flash``,
    phase 6's attention, serves prompts that are not compressed.

    Args:
        by_cells: used for compressed prompts, and for compressions whose keys the kernels cannot choose.
        is_recording: whether the launches of a selection may be recorded.
    """

    def __init__(
        self, config: ModelConfig, sizes: PagedSizes, storage: BlockStorage, by_cells: KeptCells, is_recording: bool
    ) -> None:
        self.flash, self.storage, self.by_cells = PagedAttention(config, sizes, storage), storage, by_cells
        self.cells, self.ring, device = by_cells.cells, by_cells.ring, storage.keys.device
        ends = torch.zeros(sizes.max_sequences + 1, config.num_layers * config.num_kv_heads + 2, dtype=torch.int32)
        bits = (sizes.max_sequences + 1, config.num_layers, config.num_kv_heads, -(-sizes.max_seq_len // 8))
        masks = None if by_cells.moves else torch.zeros(bits, dtype=torch.uint8, device=device)
        self.kept = KeptTokens(ends.to(device), masks)
        self.selector: HeadSelector | None = None
        compressor, budget = by_cells.compressor, by_cells.budget
        if by_cells.moves and budget.reduction in ("mean", "sum") and isinstance(compressor, BatchedCompressor):
            windows = torch.tensor([window or 0 for window in config.windows], dtype=torch.int32, device=device)
            where, which = (self.ring.queries, storage.keys, self.kept.ends, windows), (compressor, budget)
            self.selector = HeadSelector(*where, *which, config.attention_scale, is_recording)
        self.selected: dict[int, Selected] = {}  # by row, for sequences whose last step is in flight
        # the contents of each row of `kept`; a missing key: the row keeps nothing
        self.sent_rows: dict[int, Packed] = {}

    def staged(self, is_decode: bool, max_tokens: int) -> ArraySpecs:
        own = {"ring_slots": (max_tokens, np.int64), "rows": (self.flash.sizes.max_sequences, np.int32)}
        return own | self.flash.staged(is_decode, max_tokens)

    def arrays(self, batch: Batch, layout: PagedLayout) -> Arrays:
        own = {"ring_slots": self.ring.slots(batch), "rows": layout.rows[: layout.num_decoding]}
        return self.flash.arrays(batch, layout) | own

    def receive(self, batch: Batch, layout: PagedLayout, sent: Mapping[str, Tensor]) -> None:
        for row, packed in zip(layout.rows.tolist(), packed_of(layout), strict=True):
            if (selected := self.selected.pop(row, None)) is not None:  # the loaded arrays are about to change
                selected.precede()
            self._send_kept(row, packed)
        self.flash.receive(batch, layout, sent)
        self.rows, self.ring_slots, self.is_decode = sent["rows"], sent["ring_slots"], batch.is_decode
        if not self.is_decode:
            prompts = holdings_of(layout)[layout.num_decoding :]
            self.prompts, self.num_new = prompts, batch.num_new_tokens[layout.num_decoding :].tolist()
            self.is_compressed = any(one.packed is not None for one in prompts)

    def _send_kept(self, row: int, packed: Packed | None) -> None:
        """Upload what a row keeps, if that has changed."""
        if self.sent_rows.get(row) is packed:
            return
        numbers = np.zeros(self.kept.ends.shape[1], np.int32)
        if packed is None:
            del self.sent_rows[row]
        else:
            self.sent_rows[row] = packed
            numbers[-1] = packed.num_slots or packed.num_tokens
            numbers[1:-1] = packed.counts.cumsum() if packed.num_slots else 0
        self.kept.ends[row].copy_(sent(numbers, self.kept.ends.device))

    def attend(self, layer: int, q: Tensor, options: Scores, out: Tensor | None) -> Tensor:
        self.ring.keep(layer, q, self.ring_slots)
        if self.is_decode:
            return self._attend_decoding(layer, q, options, cast(Tensor, out))
        n, out = self.flash.num_decoding, torch.empty_like(q, memory_format=torch.contiguous_format)
        if n:
            self._attend_decoding(layer, q[:n], options, out[:n])
        if not self.is_compressed:
            self.flash.attend_prompts(layer, q[n:], options, out[n:])
            return out
        each = zip(q[n:].split(self.num_new), out[n:].split(self.num_new), self.prompts, strict=True)
        for queries, result, sequence in each:
            result.copy_(self.by_cells.attend(layer, queries, sequence, options))
        return out

    def _attend_decoding(self, layer: int, q: Tensor, options: Scores, out: Tensor) -> Tensor:
        storage, workspace = self.storage, self.flash.workspaces[(len(q) - 1).bit_length()]
        memory = (storage.keys, storage.values, *self.flash.decoding, self.rows, self.kept, layer)
        return condensed_attention(q, *memory, **options, workspace=workspace, out=out)

    def select(self, sequences: Sequence[Holding]) -> None:
        """Sequences of similar length share one set of launches."""
        if self.selector is None:
            return
        alike: defaultdict[tuple[int, int], list[Holding]] = defaultdict(list)
        for one in sequences:
            alike[min(self.ring.length, one.num_tail), num_tiles(one).bit_length()].append(one)
        for together in alike.values():
            self.selected |= dict.fromkeys((one.row for one in together), self._select(self.selector, together))

    def _select(self, selector: HeadSelector, sequences: Sequence[Holding]) -> Selected:
        """Select for sequences whose tails are as long as a window, or all equally long."""
        for one in sequences:
            self._send_kept(one.row, one.packed)
        return selector.select(sequences, min(self.ring.length, sequences[0].num_tail))

    def compress(self, sequence: Holding, allocate: AllocateKept) -> Packed | None:
        if self.selector is not None:
            return self._compress_all(self.selector, sequence, allocate)
        packed = self.by_cells.compress(sequence, allocate)
        if packed is not None and self.kept.masks is not None:
            mask = self.by_cells.masks[sequence.row]
            self.kept.masks[sequence.row, ..., : mask.shape[-1]] = mask
        return packed

    def _compress_all(self, selector: HeadSelector, sequence: Holding, allocate: AllocateKept) -> Packed | None:
        """Compress all layers and heads at once. The moves of kept tokens are launched while the current step is in
        flight, and run before the next one."""
        selected = self.selected.pop(sequence.row, None)
        if selected is None or (i := selected.index(sequence)) is None:
            selected, i = self._select(selector, [sequence]), 0
        counts, workspace = selected.wait(i), selected.workspace
        packed = Packed(counts, sequence.num_tokens, self.cells.slots_for(counts))
        num_before = counts.size * sequence.num_tail + (0 if sequence.packed is None else sequence.packed.total)
        if num_before - packed.total < self.cells.per_block or (table := allocate(packed)) is None:
            return None
        known, source, storage = selected.holdings[i].table, sequence.table, self.storage
        with before(selector.stream):
            if not np.array_equal(source, known):  # the prefix tree held the same blocks
                where = slice(TABLE_START, TABLE_START + len(source))
                workspace.sequences.numbers[i, where] = sent(source, storage.keys.device)
            target = None if np.array_equal(table, source[: len(table)]) else sent(table, storage.keys.device)
            kept = workspace.chosen, workspace.counts, packed.most, packed.total
            move_kept(storage.keys, storage.values, workspace.sequences, i, *kept, target)
        self.sent_rows[sequence.row] = packed
        return packed


def decode_padding(config: ModelConfig, sizes: PagedSizes, buckets: Buckets, by_cells: KeptCells) -> BucketPadding:
    """The padding of decode steps; a step with prompts is run eagerly."""
    row = sizes.max_sequences  # of no request
    paddings = []
    for bucket in reversed(buckets.decode):  # new sequences, which write to no slot
        B = bucket.num_sequences
        zeros = np.zeros(B, np.int64)
        tables = np.zeros(B, np.int32), np.arange(B + 1)
        layout = PagedLayout(np.full(B, row), zeros, zeros + 1, zeros - 1, *tables, extra=LayoutPacked((None,) * B))
        paddings.append(padding_batch(layout))
    own = {"lengths": 0, "table_starts": 0, "ring_slots": by_cells.ring.not_kept, "rows": row}
    stride = config.num_kv_heads * config.head_dim
    return BucketPadding(replace(buckets, mixed=()), paddings, sizes.block_size, stride, {**OF_TOKENS, **own}, ())
