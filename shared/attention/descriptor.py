"""What a plan is: what it has to fill, its arrays on the host, and the same on the device. Introduced in phase 6.1.

A typed descriptor over flat arrays, so that all of a step can travel in one copy and a program finds by its own number
its request and its split of the keys. How the numbers are chosen is :mod:`shared.attention.plan`'s affair.

Invariants: there are at most ``Grid.capacity`` items and ``Grid.max_states`` states; arrays are as long as the
capacity, whatever the step, so that a captured graph can be replayed with another plan, and what lies behind
``num_items`` is zero. All are int32.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray

Int32s = NDArray[np.int32]
NUM_ARRAYS = 7
"""Of a plan."""


@dataclass(frozen=True)
class Grid:
    """What a plan has to fill: one kernel on one device."""

    resident: int  # items that run at once: resident programs over the groups of heads that each item is for
    unit: int  # a split is a multiple of so many tokens: the keys of a kernel's tile
    least_split: int  # tokens; a shorter split is not worth a program

    def capacity(self, num_tiles: int) -> int:
        """The most items of a plan for so many tiles of queries."""
        return self.resident + num_tiles

    def max_states(self, tokens_per_tile: int = 1) -> int:
        """The most states of a plan: a tile of n splits, more than one, leaves n for each of its tokens.

        If a split is a fair share or more, fewer than ``resident`` tiles have several splits, and all of these together
        are fewer than ``2 * resident``.
        """
        return 2 * self.resident * tokens_per_tile


@dataclass(frozen=True)
class AttentionPlan:
    """A step's plan on the host. ``rows`` are new tokens: one a sequence when decoding."""

    num_items: Int32s  # [1]
    split_size: Int32s  # [1], in tokens; a tile's last split may be shorter
    request_indices: Int32s  # [capacity], of each item
    query_tile_indices: Int32s  # [capacity], which tile of the request's new tokens; 0 when decoding
    kv_tile_indices: Int32s  # [capacity], which split of the keys that the tile sees
    query_indptr: Int32s  # [requests + 1], the rows of each
    output_indptr: Int32s  # [rows + 1], the states of each row; none: its item stores the result itself
    tokens_per_tile: int
    is_split: bool  # whether a row may have several splits, and so states; always, where a graph is captured

    @property
    def capacity(self) -> int:
        """Items that a launch has programs for."""
        return len(self.request_indices)

    @property
    def num_rows(self) -> int:
        """New tokens, the padding of a bucket included."""
        return len(self.output_indptr) - 1

    @property
    def num_states(self) -> int:
        """States that are stored in between."""
        return int(self.output_indptr[-1])

    def arrays(self) -> tuple[Int32s, ...]:
        """What has to be sent, for :meth:`shared.engine.staging.Staging.send` together with all else of the step."""
        return (
            self.num_items,
            self.split_size,
            self.request_indices,
            self.query_tile_indices,
            self.kv_tile_indices,
            self.query_indptr,
            self.output_indptr,
        )


@dataclass(frozen=True)
class DevicePlan:
    """The arrays of an :class:`AttentionPlan` where kernels read them."""

    num_items: torch.Tensor
    split_size: torch.Tensor
    request_indices: torch.Tensor
    query_tile_indices: torch.Tensor
    kv_tile_indices: torch.Tensor
    query_indptr: torch.Tensor
    output_indptr: torch.Tensor
    capacity: int
    num_rows: int
    num_states: int
    tokens_per_tile: int
    is_split: bool

    @classmethod
    def of(cls, plan: AttentionPlan, sent: Sequence[torch.Tensor]) -> Self:
        """``sent`` is what became of ``plan.arrays()``, in that order."""
        num_items, split_size, request_indices, query_tile_indices, kv_tile_indices, query_indptr, output_indptr = sent
        return cls(
            num_items,
            split_size,
            request_indices,
            query_tile_indices,
            kv_tile_indices,
            query_indptr,
            output_indptr,
            plan.capacity,
            plan.num_rows,
            plan.num_states,
            plan.tokens_per_tile,
            plan.is_split,
        )
