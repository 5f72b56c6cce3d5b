"""The slots and block tables of a batch, with attention plans. Introduced in phase 6.1.

Attention is planned once a step, for all layers: :mod:`shared.attention.plan` divides the keys of all sequences into
splits of one size, and each layer's launch follows the plan. A plan depends on the layer only through its window, so a
step has one plan for each distinct window of the model; a step that both decodes and prefills (phase 7) has two.

Invariant: plans are made for the lengths in the layout, which the kernels read. The keys of tokens that may follow
(``num_ahead``) are planned too, and a split without keys is a state that changes nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch

from shared.attention.descriptor import AttentionPlan, Grid
from shared.attention.plan import plan_decode, plan_prefill
from shared.cache.layout.paged import PagedLayout
from shared.cache.layout.slots import Integers
from shared.kernels.attention.planned_tiling import (
    DecodeTiling,
    PrefillTiling,
    can_copy,
    can_specialize,
    decode_tiling,
    decode_tilings,
    prefill_tiling,
)
from shared.models.config import ModelConfig


class StepPlans(NamedTuple):
    """The plans of a step, by window, for its decoding sequences and for its prompts; empty if it has none."""

    decode: Mapping[int | None, AttentionPlan]
    prefill: Mapping[int | None, AttentionPlan]


class StepLaunches(NamedTuple):
    """The launches of each layer: the rows of queries that they get, and their tilings; None: there is no launch."""

    num_decoding: int  # the first rows, those of the decoding sequences
    first_prompt: int  # the row at which those of the prompts begin
    decode: Any  # a DecodeTiling
    prefill: Any  # a PrefillTiling
    is_captured: bool = False  # whether the launches also serve other steps of these sizes


@dataclass(frozen=True)
class AttentionPlanner:
    """Plans the attention of a model on a device; ``itemsize`` is the bytes per element of its keys."""

    config: ModelConfig
    windows: tuple[int | None, ...]  # the distinct windows of the layers
    itemsize: int
    device: torch.device
    last_decode: dict[tuple[bytes, int | None], dict[int | None, AttentionPlan]] = field(
        default_factory=dict, compare=False
    )
    """The plans of the last decoding sequences, by their lengths in whole tiles and the rows of the launch."""
    grids: dict[int, Grid] = field(default_factory=dict, compare=False)  # of decode launches, by their rows
    has_masks: bool = False  # whether new tokens may be mask tokens (phase 11.1)

    @cached_property
    def can_copy(self) -> bool:
        """Whether the keys of prompts are copied; a model with mask tokens reads them from the blocks."""
        return not self.has_masks and can_copy(self.itemsize, self.device)

    @cached_property
    def can_specialize(self) -> bool:
        """Whether specialized warps attend to the copied keys."""
        group = self.config.num_heads // self.config.num_kv_heads
        return can_specialize(group, self.itemsize, self.config.attention_softcap, self.device)

    def decode_tiling(self, num_sequences: int) -> DecodeTiling:
        """The tiling of a decode step of ``num_sequences`` sequences."""
        return decode_tiling(num_sequences, self.config.num_kv_heads, self.config.head_dim, self.itemsize)

    def decode_grid(self, num_sequences: int) -> Grid:
        """The grid of a decode step of ``num_sequences`` sequences."""
        grid = self.grids.get(num_sequences)
        if grid is None:
            grid = self.decode_tiling(num_sequences).grid(self.config.num_kv_heads, self.device)
            self.grids[num_sequences] = grid
        return grid

    def prefill_tiling(self, num_tokens: int, num_sequences: int) -> PrefillTiling:
        """The tiling of a prefill step of ``num_tokens`` new tokens."""
        config = self.config
        heads = (config.num_heads, config.num_kv_heads, config.head_dim)
        return prefill_tiling(num_tokens, num_sequences, *heads, self.itemsize, self.can_copy, self.can_specialize)

    def most_numbers(self, num_tokens: int, num_sequences: int) -> tuple[int, ...]:
        """Maximum length of each array of a plan, in the order of ``AttentionPlan.arrays``, for steps of this size."""
        B = num_sequences
        decode = decode_tilings(B, self.config.num_kv_heads, self.config.head_dim, self.itemsize)
        tilings: list[DecodeTiling | PrefillTiling] = [*decode, self.prefill_tiling(num_tokens, B)]
        resident = max(tiling.grid(self.config.num_kv_heads, self.device).resident for tiling in tilings)
        capacity = resident + num_tokens  # a tile of queries has at least one token
        return 1, 1, capacity, capacity, capacity, num_sequences + 1, num_tokens + 1

    def plan(self, num_new: Integers, lengths: Integers, num_decoding: int) -> StepPlans:
        """The plans of a step whose first ``num_decoding`` sequences have one new token each."""
        n = num_decoding
        return StepPlans(self._plan_decode(lengths[:n]), self._plan_prefill(num_new[n:], lengths[n:]))

    def launches(self, num_tokens: int, num_sequences: int, num_decoding: int) -> StepLaunches:
        """The launches of a step whose first ``num_decoding`` sequences have one new token each."""
        T, B, n = num_tokens, num_sequences, num_decoding
        decode = self.decode_tiling(n) if n else None
        return StepLaunches(n, n, decode, self.prefill_tiling(T - n, B - n) if n < B else None)

    def _plan_decode(self, lengths: Integers, num_rows: int | None = None) -> dict[int | None, AttentionPlan]:
        """``num_rows``: the rows of a captured launch, which needs a plan even if nothing decodes."""
        is_captured = num_rows is not None
        if not len(lengths) and not is_captured:
            return {}
        grid = self.decode_grid(num_rows or len(lengths))
        # no split is smaller, so this serves until a sequence needs a tile
        tiles = -(-lengths // grid.unit) * grid.unit
        key = tiles.tobytes(), num_rows
        plans = self.last_decode.get(key)
        if plans is None:
            options: dict[str, Any] = {"num_rows": num_rows, "is_captured": is_captured}
            plans = {window: plan_decode(tiles, grid, window=window, **options) for window in self.windows}
            self.last_decode.clear()
            self.last_decode[key] = plans
        return plans

    def _plan_prefill(self, num_new: Integers, lengths: Integers) -> dict[int | None, AttentionPlan]:
        if not len(lengths):
            return {}
        tiling = self.prefill_tiling(int(num_new.sum()), len(num_new))
        grid = tiling.grid(self.config.num_kv_heads, self.device)
        tokens = tiling.tokens(self.config.num_heads // self.config.num_kv_heads)
        tiles: dict[str, Any] = {"tokens_per_tile": tokens, "has_masks": self.has_masks}
        return {window: plan_prefill(num_new, lengths, grid, window=window, **tiles) for window in self.windows}


@dataclass(frozen=True)
class LayoutPlans:
    """The plans of a layout; see :class:`shared.cache.layout.paged.LayoutExtra`."""

    planner: AttentionPlanner
    plans: StepPlans

    @classmethod
    def planned(cls, layout: PagedLayout, planner: AttentionPlanner) -> PagedLayout:
        """The layout with its plans."""
        plans = planner.plan(layout.num_new, layout.lengths + layout.num_ahead, layout.num_decoding)
        return layout.with_extra(cls(planner, plans))

    def part(self, layout: PagedLayout, sequences: slice) -> PagedLayout:
        """The part gets new plans."""
        return self.planned(layout, self.planner)
