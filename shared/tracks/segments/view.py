"""The model's view of a paged KV cache in which requests are made of segments. Introduced in phase 9.1.

A segment's keys stay as they were written, rotated for positions counted from the segment's own first token. A query
that reads a segment at ``offset`` is moved back by ``offset`` positions (:mod:`shared.tracks.segments.relocation`);
then both count from the segment's first token, and so does the window. Each layer's RoPE has its own frequencies (Gemma
3 has two).

``rotation`` selects one of two alternatives for comparison: rotate a segment's keys by the offset when they are read,
rounding them again (the *differential* rotation of Braidinfer); or cache all keys unrotated, and rotate them when they
are read.

A *group* is a segment with all the queries of the step that read it; its keys are gathered once for all of their
sequences. Steps without segments run as in :class:`shared.cache.view.paged.PagedView`.

Invariants: those of ``PagedView``; a step never changes a segment's keys.
"""

from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor

from shared.attention.states import merge
from shared.cache.layout.paged import PagedLayout, PagedSizes
from shared.cache.view.block_storage import BlockStorage
from shared.cache.view.interface import StepInputs
from shared.cache.view.operations_attention import OperationsAttention, Piece
from shared.cache.view.paged import PagedView
from shared.engine.batch import Batch
from shared.models.config import ModelConfig, RopeConfig
from shared.models.tokens import QueryKeyTransform
from shared.ops.rope import inverse_frequencies, rotate
from shared.tracks.segments.attention import range_state
from shared.tracks.segments.layout import LayoutRanges, Range
from shared.tracks.segments.relocation import relocate, turns


@dataclass(frozen=True)
class Group:
    """A segment and the step's tokens that attend to it."""

    piece: Piece
    rows: Tensor  # int64 [n], indices of the step's tokens, without duplicates
    places: Tensor  # int64 [n], their positions on the segment's scale
    turns: dict[RopeConfig, Tensor]  # fp32 [n, 2, 1, D]: rotations that move the queries back by the segment's offset
    offset: int  # for the first query's sequence; for all of them if keys are rotated


class SegmentView:
    """Keys and values in blocks, for sequences and segments; see ``BatchView``."""

    rotation: Literal["queries", "keys", "unrotated keys"] = "queries"
    """What is rotated when a segment is read; set it before the first step."""

    def __init__(
        self, config: ModelConfig, sizes: PagedSizes, dtype: torch.dtype, storage: BlockStorage, backend: str
    ) -> None:
        self.operations = OperationsAttention(storage, backend)
        self.paged = PagedView(config, sizes, dtype, storage, self.operations)
        self.keys, self.values, self.num_bytes = storage.keys, storage.values, storage.num_bytes
        self.ropes = [config.layer_rope(layer) for layer in range(config.num_layers)]
        self.frequencies = {rope: inverse_frequencies(rope, config.head_dim) for rope in dict.fromkeys(self.ropes)}
        self.groups: list[Group] = []

    def load(self, batch: Batch) -> StepInputs:
        layout = cast(PagedLayout, batch.layout)
        extra = layout.extra
        self.groups = self._groups(batch, extra.ranges) if isinstance(extra, LayoutRanges) else []
        self.positions = batch.positions.tolist()
        return self.paged.load(batch)

    def _groups(self, batch: Batch, ranges: tuple[Range, ...]) -> list[Group]:
        """The ranges of a step, by segment. A second occurrence of a segment in one sequence makes another group."""
        ends = np.append(0, batch.num_new_tokens.cumsum())
        members: dict[tuple[int, int, int], list[Range]] = {}
        for one in ranges:
            first, offset, times = int(one.blocks[0]), 0 if self.rotation == "queries" else one.offset, 0
            while any(other.sequence == one.sequence for other in members.get((first, offset, times), ())):
                times += 1
            members.setdefault((first, offset, times), []).append(one)
        groups = []
        for same in members.values():
            rows = np.concatenate([np.arange(ends[one.sequence], ends[one.sequence + 1]) for one in same])
            offsets = np.repeat([one.offset for one in same], batch.num_new_tokens[[one.sequence for one in same]])
            back = torch.from_numpy(-offsets)
            groups.append(
                Group(
                    Piece(torch.from_numpy(same[0].blocks.astype(np.int64)), 0, same[0].length),
                    torch.from_numpy(rows),
                    torch.from_numpy(batch.positions[rows] - offsets),
                    {rope: turns(back, frequencies) for rope, frequencies in self.frequencies.items()},
                    same[0].offset,
                )
            )
        return groups

    def write(self, layer: int, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, qk: QueryKeyTransform) -> Tensor:
        if self.rotation != "unrotated keys":
            return self.paged.write(layer, q, k, v, positions, qk)
        both = qk(q, k, positions)[0], qk(q, k, torch.zeros_like(positions))[1]  # at position 0 nothing is rotated
        return self.paged.write(layer, q, k, v, positions, lambda *_: both)

    def _read(self, layer: int, piece: Piece, start: int, is_own: bool) -> tuple[Tensor, Tensor]:
        """Keys and values of a range, [Hkv, S, D]; ``start`` is the position of the first; ``is_own`` means that it is
        not a segment's range."""
        (k, v), frequencies = self.operations.read(layer, piece), self.frequencies[self.ropes[layer]]
        if self.rotation == "unrotated keys":
            k = relocate(k.float(), start + torch.arange(len(k)), frequencies)
        elif self.rotation == "keys" and not is_own:
            k = relocate(k, torch.full((len(k),), start), frequencies)
        return k.transpose(0, 1), v.transpose(0, 1)

    def attend(
        self, layer: int, q: Tensor, *, scale: float, window: int | None = None, softcap: float | None = None
    ) -> Tensor:
        if not self.groups and self.rotation != "unrotated keys":
            return self.paged.attend(layer, q, scale=scale, window=window, softcap=softcap)
        num_new, pieces = self.operations.num_new, self.operations.pieces(window)
        options: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap}
        values, logs = torch.empty(q.shape), torch.empty(q.shape[:2])
        for queries, rows, piece in zip(q.split(num_new), torch.arange(len(q)).split(num_new), pieces, strict=True):
            size = piece.end - piece.start
            k, v = self._read(layer, piece, self.positions[int(rows[-1])] - size + 1, True)
            places = torch.arange(size - len(rows), size)
            values[rows], logs[rows] = range_state(queries, k, v, places, **options)
        for group in self.groups:
            k, v = self._read(layer, group.piece, group.offset, False)
            queries = q[group.rows]
            if self.rotation == "queries":
                queries = rotate(queries.float(), group.turns[self.ropes[layer]])
            state = range_state(queries, k, v, group.places, **options)
            rows = group.rows
            values[rows], logs[rows] = merge((values[rows], logs[rows]), state)
        return values.to(q.dtype)
