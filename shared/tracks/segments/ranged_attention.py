"""Attention on a GPU over blocks of sequences and of segments. Introduced in phase 9.1.

A step with segments has its own plans and kernel (:mod:`shared.tracks.segments.range_plan`,
:mod:`shared.tracks.segments.kernels.range_attention`), whether it decodes or has prompts. It is captured in separate
buckets, since its launches differ. The plan and the segments' block tables are uploaded only when they change. In
decode steps that is rare: a request is added or removed, or a position leaves its interval of ``SLACK``.

Steps without segments run as in :class:`shared.cache.view.planned_attention.PlannedAttention`. Invariants: a step never
changes a segment's keys; a plan that does not fit the captured arrays is uploaded to separate ones and run eagerly.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shared.attention.descriptor import Int32s
from shared.cache.layout.bucket_planner import BucketPlanner
from shared.cache.layout.paged import PagedLayout
from shared.cache.layout.slots import Integers
from shared.cache.view.attention import Arrays, ArraySpecs, Scores
from shared.cache.view.bucket_padding import BucketPadding
from shared.cache.view.paged_attention import table_arrays
from shared.cache.view.planned_attention import PlannedAttention
from shared.engine.batch import Batch
from shared.engine.executor.buckets import Bucket
from shared.engine.executor.staging import Staging
from shared.models.config import RopeConfig
from shared.ops.rope import inverse_frequencies
from shared.tracks.segments.kernels.range_attention import (
    RangeTiling,
    RangeWorkspace,
    range_attention,
    range_tiling,
    turn_rows,
)
from shared.tracks.segments.layout import LayoutRanges, Range
from shared.tracks.segments.range_plan import SLACK, RangeLimits, RangePlan, plan_ranges
from shared.tracks.segments.range_tiles import LEAST_SAVED, Ranges, Tiles

MOST_CAPTURED_TOKENS = 256
"""Maximum tokens of a captured mixed step with segments: a question is short, since long texts are in segments."""
HostPlans = dict[int | None, RangePlan[Int32s]]


class RangedAttention:
    """A ``PagedAttentionProtocol`` and a ``Padding``; ``planned`` and ``padding`` serve steps without segments."""

    def __init__(self, planned: PlannedAttention, padding: BucketPadding, dtype: torch.dtype) -> None:
        self.planned, self.padding, self.buckets = planned, padding, padding.buckets
        self.storage, self.sizes, self.config = planned.storage, planned.sizes, planned.planner.config
        self.advance = padding.advance
        config, sizes, buckets = self.config, self.sizes, self.buckets
        device, Hq, Hkv = self.storage.keys.device, config.num_heads, config.num_kv_heads
        self.ropes = [config.layer_rope(layer) for layer in range(config.num_layers)]
        self.frequencies = {rope: inverse_frequencies(rope, config.head_dim).to(device) for rope in set(self.ropes)}
        circles = {rope: angles.double() / (2 * math.pi) for rope, angles in self.frequencies.items()}
        self.circles = [circles[rope] for rope in self.ropes]  # for each layer, turns of a circle per position
        self.group = Hq // Hkv
        self.tilings = [
            range_tiling(is_shared, self.group, config.head_dim, dtype.itemsize) for is_shared in (False, True)
        ]
        captured = [self._ranged(one, tiling) for tiling in self.tilings for one in buckets.decode]
        captured += [self._ranged(one, self.tilings[1]) for one in buckets.mixed if self._is_small(one)]
        rows = max([sizes.max_sequences, *(one.num_tokens for one in captured)])
        alone, shared = (
            RangeLimits.of(rows, tiling.grid(Hkv, device), tiling.tokens(self.group)) for tiling in self.tilings
        )
        self.limits = alone | shared
        self.range_staging = Staging(device, self._range_specs())
        self.range_workspace = RangeWorkspace.of(self.limits.states, Hq, config.head_dim, device)
        self.range_plans: dict[int | None, RangePlan[Tensor]] = {}
        self.kinds = list(zip(config.windows, self.ropes, strict=True))  # the layers' kinds: window and RoPE
        shape = (self.limits.pieces, 2, config.head_dim // 2)
        self.turn_rows = {kind: torch.empty(shape, dtype=torch.float32, device=device) for kind in self.kinds}
        self.step_turns: dict[tuple[int | None, RopeConfig], Tensor] = {}
        self.planned_for: Any = None  # the state for which the uploaded plans were made
        self.tiled_for: Any = None  # what the tiles were made for, besides the ranges
        self.planned_ranges: tuple[Range, ...] = ()
        self.paddings: Sequence[Batch] = [*padding.paddings, *map(self._ranged_padding, reversed(captured))]

    @staticmethod
    def _is_small(bucket: Bucket) -> bool:
        return bucket.num_tokens <= MOST_CAPTURED_TOKENS

    @staticmethod
    def _ranged(bucket: Bucket, tiling: RangeTiling) -> Bucket:
        return bucket._replace(tile_rows=tiling.rows)

    def _range_specs(self) -> ArraySpecs:
        """Lengths and dtypes of the staged plans, and of the segments' tables."""
        limits = self.limits
        sizes = {"num_items": 1, "item_pieces": limits.items + 1, "output_indptr": limits.rows + 1}
        sizes |= {name: getattr(limits, f"{name.split('_')[0]}s") for name in _NAMES if name not in sizes}
        windows = dict.fromkeys(self.config.windows)
        specs: ArraySpecs = {
            f"{name} of window {window}": (sizes[name], np.int32) for window in windows for name in _NAMES
        }
        return specs | {"segment_tables": (self.sizes.num_blocks, np.int32)}

    def lay_out(self, layout: PagedLayout) -> PagedLayout:
        """Ranges are planned when the step is padded."""
        return layout if isinstance(layout.extra, LayoutRanges) else self.planned.lay_out(layout)

    def staged(self, is_decode: bool, max_tokens: int) -> ArraySpecs:
        own: ArraySpecs = {"all_table_starts": (self.sizes.max_sequences, np.int32)}
        return own | self.planned.staged(is_decode, max_tokens)

    def bucket_of(self, batch: Batch) -> Bucket | None:
        """Makes the plans of a step with segments, which must fit its bucket."""
        bucket = self.padding.bucket_of(batch)
        extra = cast(PagedLayout, batch.layout).extra
        if not isinstance(extra, LayoutRanges):
            return bucket
        if bucket is not None and not bucket.is_decode and not self._is_small(bucket):
            bucket = None
        is_held = self._plan(batch, extra.ranges, bucket)
        return self._ranged(bucket, self.range_tiling) if bucket is not None and is_held else None

    def pad(self, arrays: Arrays, bucket: Bucket | None) -> None:
        self.padding.pad(arrays, bucket)

    def _plan(self, batch: Batch, ranges: tuple[Range, ...], bucket: Bucket | None) -> bool:
        """Ensure that a step's plans are on the device; returns whether they are in the arrays that captured steps
        read."""
        layout = batch.layout
        if ranges is not self.planned_ranges:
            self.planned_ranges, self.ranges = ranges, Ranges.of(ranges)
            self.planned_for = self.tiled_for = None
        first, last = batch.positions, batch.positions + layout.num_ahead
        if batch.is_decode:
            own = layout.num_cached  # of the sequence's own tokens, after its segments
            first, last = first - own % SLACK, last + SLACK - 1 - own % SLACK
        key = (first.tobytes(), last.tobytes(), batch.num_new_tokens.tobytes(), bucket)
        if key != self.planned_for:
            self.range_tiling = self.tilings[self.ranges.is_shared or not batch.is_decode]
            num_rows = bucket.num_tokens if bucket is not None else batch.num_tokens
            of_step = (self._tiles(batch.num_new_tokens), first, last)
            grid = self.range_tiling.grid(self.config.num_kv_heads, self.storage.keys.device)
            plans = {
                window: plan_ranges(*of_step, grid, num_rows=num_rows, window=window)
                for window in dict.fromkeys(self.config.windows)
            }
            self.planned_for, self.fits = key, all(map(self.limits.hold, plans.values()))
            if not self.fits:
                end = batch.num_tokens + 1
                plans = {window: replace(one, output_indptr=one.output_indptr[:end]) for window, one in plans.items()}
            self._send(plans)
        return self.fits

    def _tiles(self, num_new: Integers) -> Tiles:
        """The tiles of the loaded ranges; the previous ones if only positions have changed."""
        tokens, most = self.range_tiling.tokens(self.group), self.limits.slots - self.limits.rows
        key = (num_new.tobytes(), tokens)
        if self.tiled_for != key:
            self.tiled_for, self.tiles = key, Tiles.of(self.ranges, num_new, tokens, most)
        return self.tiles

    def _send(self, plans: HostPlans) -> None:
        arrays: dict[str, NDArray[Any]] = {
            f"{name} of window {window}": array
            for window, plan in plans.items()
            for name, array in plan.arrays().items()
        }
        arrays["segment_tables"] = self.ranges.tables
        staging, workspace = self.range_staging, self.range_workspace
        if not self.fits:
            config, most = self.config, max(plan.num_states for plan in plans.values())
            staging = Staging.for_arrays(self.storage.keys.device, arrays)
            workspace = RangeWorkspace.of(max(1, most), config.num_heads, config.head_dim, self.storage.keys.device)
        sent = staging.send(arrays)
        self.range_plans = {
            window: RangePlan(*(sent[f"{name} of window {window}"] for name in _NAMES)) for window in plans
        }
        for kind, rows in self.turn_rows.items():
            found = turn_rows(self.range_plans[kind[0]].piece_turns, self.circles[self.kinds.index(kind)])
            self.step_turns[kind] = rows[: len(found)].copy_(found) if self.fits else found
        self.segment_tables, self.step_workspace = sent["segment_tables"], workspace

    def arrays(self, batch: Batch, layout: PagedLayout) -> Arrays:
        if not isinstance(layout.extra, LayoutRanges):
            return self.planned.arrays(batch, layout)
        return table_arrays(batch, layout) | {"all_table_starts": layout.table_starts[:-1]}

    def receive(self, batch: Batch, layout: PagedLayout, sent: Mapping[str, Tensor]) -> None:
        self.is_ranged = isinstance(layout.extra, LayoutRanges)
        if self.is_ranged:
            self.of_sequences = sent["positions"], sent["tables"], sent["all_table_starts"]
        else:
            self.planned.receive(batch, layout, sent)

    def attend(self, layer: int, q: Tensor, options: Scores, out: Tensor | None) -> Tensor:
        if not self.is_ranged:
            return self.planned.attend(layer, q, options, out)
        if out is None:
            out = torch.empty_like(q, memory_format=torch.contiguous_format)
        return range_attention(
            q, self.storage.layer_keys[layer], self.storage.layer_values[layer], *self.of_sequences,
            self.segment_tables, self.circles[layer], self.step_turns[self.kinds[layer]],
            self.range_plans[options["window"]], **options,
            tiling=self.range_tiling, workspace=self.step_workspace, out=out,
        )  # fmt: skip

    def _ranged_padding(self, bucket: Bucket) -> Batch:
        """A batch for capturing a bucket with segments: like the plain one, but its first sequence follows a segment
        that occurs twice.

        A captured step runs once, so it does read these tables, and their positions must be consistent.
        """
        batch = cast(BucketPlanner, self.planned.planner).padding(bucket, self.sizes.block_size)
        length = LEAST_SAVED if bucket.tile_rows == self.tilings[1].rows else 1
        segment = Range(0, 0, length, np.zeros(-(-length // self.sizes.block_size), np.int32))
        ranges = (segment, segment._replace(offset=length))
        layout = replace(cast(PagedLayout, batch.layout), extra=LayoutRanges(ranges))
        positions = np.arange(batch.num_tokens) < batch.num_new_tokens[0]
        return replace(batch, layout=layout, positions=2 * length * positions.astype(np.int64))


_NAMES = [one.name for one in fields(RangePlan)]
