"""Prompts' keys and values in a contiguous matrix, copied out of the blocks once per layer. Introduced in phase 6.1.

A program that attends to keys in blocks computes an address for each token and loads 16 bytes per thread. From Hopper
on, a GPU has an engine that copies whole tiles of a matrix into shared memory while the tensor cores multiply (the
*tensor memory accelerator*). But its tiles are adjacent rows, and a block has too few of them. So the keys and values
that prompts attend to are first copied into one matrix. Each of their tiles is then read by many programs, so the copy
costs a few percent of what it saves (docs/EXPERIMENTS.md).

The matrix has ``num_rows`` rows for keys and as many for values, ``[2 · num_rows, Hkv · D]``. Each request with at
least ``LEAST_NEW`` new tokens gets rows, in batch order until they run out. It gets one for each token of its sequence,
rounded up to whole tiles. In a sliding window a tile may begin at any token, so there a tile of zeros follows, and no
tile reaches the next request's rows. The other requests' keys are read from the blocks, by a separate launch. The copy
derives the rows from the lengths, and writes where each request's begin, so a captured step copies for any batch.

Invariant: a row that is read holds a token of the request itself, or zeros.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from shared.kernels.attention.paged_attention import token_rows
from shared.kernels.e4m3 import widened
from shared.kernels.launch import (
    TensorDescriptor,
    launch,
    launch_dependents,
    next_power_of_two,
    num_multiprocessors,
    tl,
    triton,
    wait_for_previous,
)

LEAST_NEW = tl.constexpr(64)
"""Minimum new tokens of a request for its keys to be copied: a copy reads and writes each key once."""
LEAST_REQUESTS = 64
"""Minimum number of requests that a kernel is compiled for: one kernel serves every smaller batch."""
NUMBERS = 128
"""Maximum numbers of a token that a program of the copy moves at a time."""


@dataclass(frozen=True)
class PromptKeys:
    """The matrix on the device, in the dtype of the blocks, or in fp16 if they hold 8-bit numbers."""

    matrix: torch.Tensor  # [2 · num_rows, Hkv · D]; finite
    first_rows: torch.Tensor  # int32 [B], of each request's first token, from the last copy; -1: it was not copied
    has_windows: bool  # whether a tile may begin at any token, rather than at whole tiles
    descriptors: dict[Any, Any] = field(default_factory=dict)  # keyed by the tile, the head size, and what made them

    @classmethod
    def of(
        cls,
        num_rows: int,
        num_requests: int,
        num_numbers: int,
        dtype: torch.dtype,
        device: torch.device,
        has_windows: bool,
    ) -> "PromptKeys":
        """For ``num_rows`` tokens of ``num_numbers`` = Hkv · D elements, of up to ``num_requests`` requests, whose keys
        have ``dtype`` in the blocks."""
        wide = dtype if dtype.itemsize > 1 else torch.float16
        matrix = torch.zeros(2 * num_rows, num_numbers, dtype=wide, device=device)
        return cls(matrix, torch.full((num_requests,), -1, dtype=torch.int32, device=device), has_windows)

    @property
    def num_rows(self) -> int:
        """Rows for keys; values have as many."""
        return len(self.matrix) // 2

    def copies(self, num_new: NDArray[np.int64], lengths: NDArray[np.int64], tile: int) -> tuple[bool, bool]:
        """Whether some requests' keys are copied, and whether some are not.

        Args:
            num_new, lengths: ``[B]``: the new tokens of each prompt, and all tokens of its sequence.
        """
        counts = np.where(num_new >= LEAST_NEW.value, (-(-lengths // tile) + self.has_windows) * tile, 0)
        is_copied = (counts > 0) & (counts.cumsum() <= self.num_rows)
        return bool(is_copied.any()), not is_copied.all()

    def tiles(self, tile: int, head_dim: int, describe: Callable[..., Any] | None = None) -> Any:
        """The descriptor with which kernels load tiles ``[tile, head_dim]``; ``describe`` makes it, by default
        Triton's."""
        found = self.descriptors.get((tile, head_dim, describe))
        if found is None:
            found = (describe or TensorDescriptor.from_tensor)(self.matrix, [tile, head_dim])
            self.descriptors[tile, head_dim, describe] = found
        return found


@triton.jit(do_not_specialize=["num_requests"])
def copy_keys_kernel(
    keys, values, tables, table_starts, lengths, query_indptr, matrix, first_rows, num_requests, num_rows, window,
    BLOCK_SIZE: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr, NUMBERS: tl.constexpr,
    REQUESTS: tl.constexpr, HAS_WINDOWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (i, j) copies tiles j, j + the grid's second size, … of rows, in columns i · NUMBERS to (i + 1) ·
    NUMBERS. The first program writes where the rows of each of up to REQUESTS requests begin."""
    launch_dependents(PDL)
    b = tl.arange(0, REQUESTS)
    is_request = b < num_requests
    all_new = tl.load(query_indptr + b + 1, mask=is_request, other=0)
    all_new -= tl.load(query_indptr + b, mask=is_request, other=0)
    num_tiles = tl.cdiv(tl.load(lengths + b, mask=is_request, other=0), TILE) + HAS_WINDOWS
    counts = tl.where(all_new >= LEAST_NEW, num_tiles * TILE, 0)
    ends = tl.cumsum(counts, 0)
    column = tl.program_id(0) * NUMBERS + tl.arange(0, NUMBERS)
    used = tl.max(tl.where(ends <= num_rows, ends, 0), 0)
    wait_for_previous(PDL)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        is_copied = (counts > 0) & (ends <= num_rows)
        tl.store(first_rows + b, tl.where(is_copied, ends - counts, -1), mask=is_request)
    for row in tl.range(tl.program_id(1) * TILE, used, tl.num_programs(1) * TILE):
        is_owner = (row < ends) & (row >= ends - counts)
        request = tl.sum(tl.where(is_owner, b, 0), 0)
        index = row - tl.sum(tl.where(is_owner, ends - counts, 0), 0) + tl.arange(0, TILE)
        length = tl.load(lengths + request)
        num_new = tl.load(query_indptr + request + 1) - tl.load(query_indptr + request)
        first = tl.maximum(length - num_new + 1 - window, 0)  # the first key that a new token attends to
        table = tables + tl.load(table_starts + request)
        is_seen = (index >= first) & (index < length)
        tokens = token_rows(index, length, table, 0, BLOCK_SIZE, HKV, D)[:, None] + column[None, :]
        into = (row + tl.arange(0, TILE)).to(tl.int64)[:, None] * (HKV * D) + column[None, :]
        dtype: tl.constexpr = matrix.dtype.element_ty
        k = widened(tl.load(keys + tokens, mask=is_seen[:, None], other=0.0), dtype)
        tl.store(matrix + into, k, mask=(index >= first)[:, None])
        v = widened(tl.load(values + tokens, mask=is_seen[:, None], other=0.0), dtype)
        tl.store(matrix + num_rows * (HKV * D) + into, v, mask=(index >= first)[:, None])


def copy_keys(
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    table_starts: torch.Tensor,
    lengths: torch.Tensor,
    query_indptr: torch.Tensor,
    window: int,
    into: PromptKeys,
    tile: int,
) -> None:
    """Copy the keys and values that prompts attend to, for tiles of ``tile`` tokens.

    Args:
        keys, values, tables, table_starts, lengths: as in
            :func:`shared.kernels.attention.planned_prefill.planned_prefill`.
        query_indptr: int32 ``[B + 1]``, where the new tokens of each request begin.
        window: the number of tokens that a new token attends to.
    """
    _, block_size, Hkv, D = keys.shape
    num_numbers = D
    while num_numbers * 2 <= NUMBERS and Hkv * D % (num_numbers * 2) == 0:
        num_numbers *= 2
    columns = Hkv * D // num_numbers
    num_requests = len(query_indptr) - 1
    launch(
        copy_keys_kernel, (columns, max(1, 2 * num_multiprocessors(keys.device) // columns)),
        keys, values, tables, table_starts, lengths, query_indptr, into.matrix, into.first_rows, num_requests,
        into.num_rows, window,
        BLOCK_SIZE=block_size, HKV=Hkv, D=D, TILE=tile, NUMBERS=num_numbers,
        REQUESTS=next_power_of_two(max(num_requests, LEAST_REQUESTS)), HAS_WINDOWS=into.has_windows, num_warps=8,
    )  # fmt: skip
