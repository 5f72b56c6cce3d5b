"""Attention plans: their limits, their arrays on the host, and the same arrays on the device. Introduced in phase 6.1.

A plan is a set of flat arrays, uploaded in the step's single copy; a program finds its request and its split by its own
id.

Invariants: there are at most ``Grid.capacity`` items and ``Grid.max_states`` states; arrays are as long as the
capacity, whatever the step, so that a captured CUDA graph can be replayed with another plan; entries after
``num_items`` are zero. All arrays are int32.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Int32s = NDArray[np.int32]
NUM_ARRAYS = 7
"""The number of arrays of a plan."""


@dataclass(frozen=True)
class Grid:
    """The launch grid that a plan fills: one kernel on one device."""

    resident: int  # items that run at once: resident programs divided by the programs per item, one per head group
    unit: int  # tokens of a kernel's key tile; a split is a multiple of it
    least_split: int  # tokens; a shorter split is not worth a program

    def capacity(self, num_tiles: int) -> int:
        """Maximum number of items of a plan for ``num_tiles`` query tiles."""
        return self.resident + num_tiles

    def max_states(self, tokens_per_tile: int = 1) -> int:
        """Maximum number of states of a plan: a tile with n > 1 splits stores n states for each of its tokens.

        A split is at least an equal share of the keys. So fewer than ``resident`` tiles have several splits, and
        together these have fewer than ``2 * resident`` splits.
        """
        return 2 * self.resident * tokens_per_tile


@dataclass(frozen=True)
class AttentionPlan:
    """A step's plan on the host. ``rows`` are new tokens: one per sequence when decoding."""

    num_items: Int32s  # [1]
    split_size: Int32s  # [1], in tokens; a tile's last split may be shorter
    request_indices: Int32s  # [capacity], the request of each item
    query_tile_indices: Int32s  # [capacity], the tile among the request's new tokens; 0 when decoding
    kv_tile_indices: Int32s  # [capacity], the split among the keys that the tile attends to
    query_indptr: Int32s  # [requests + 1], the rows of each request
    output_indptr: Int32s  # [rows + 1], the states of each row; if a row has none, its item stores the output itself
    tokens_per_tile: int
    is_split: bool  # whether a row may have several splits, and therefore states; always True if a graph is captured

    @property
    def capacity(self) -> int:
        """The number of items for which a launch has programs."""
        return len(self.request_indices)

    @property
    def num_rows(self) -> int:
        """New tokens, including a bucket's padding."""
        return len(self.output_indptr) - 1

    @property
    def num_states(self) -> int:
        """Number of intermediate states."""
        return int(self.output_indptr[-1])

    def arrays(self) -> tuple[Int32s, ...]:
        """The arrays to upload, in one copy with the step's others."""
        of_items = self.request_indices, self.query_tile_indices, self.kv_tile_indices
        return self.num_items, self.split_size, *of_items, self.query_indptr, self.output_indptr


@dataclass(frozen=True)
class DevicePlan:
    """The arrays of an :class:`AttentionPlan` on the device."""

    num_items: Tensor
    split_size: Tensor
    request_indices: Tensor
    query_tile_indices: Tensor
    kv_tile_indices: Tensor
    query_indptr: Tensor
    output_indptr: Tensor
    capacity: int
    num_rows: int
    num_states: int
    tokens_per_tile: int
    is_split: bool

    @classmethod
    def of(cls, plan: AttentionPlan, sent: Sequence[Tensor]) -> Self:
        """``sent`` holds the uploaded ``plan.arrays()``, in that order."""
        numbers = plan.capacity, plan.num_rows, plan.num_states, plan.tokens_per_tile, plan.is_split
        values: list[Any] = [*sent, *numbers]
        return cls(*values)
