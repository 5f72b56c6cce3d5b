"""Selects on the GPU, without waiting, which keys each head of cached sequences keeps. Introduced in phase 9.2.

:func:`shared.tracks.compression.selection.select` defines the selection for one head. Here a few launches select for
all layers and heads of several sequences. The host receives only the number of keys that each head keeps, by an
asynchronous copy, and the pool counts blocks from it. The launches run on their own stream: selection is compute-bound,
while the step that runs at the same time is memory-bound.

A request that is compressed repeatedly has about the same length each time. So selections use *workspaces*, fixed
buffers for a number of sequences of about one length, and the launches on a workspace are recorded as a CUDA graph
(:mod:`shared.engine.executor.graphs`).

Invariant: nothing is written to the KV cache.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shared.cache.layout.slots import Integers
from shared.engine.executor.graphs import recorded
from shared.engine.executor.staging import record
from shared.tracks.compression.compressors import BatchedCompressor
from shared.tracks.compression.kernels.key_redundancy import key_redundancy
from shared.tracks.compression.kernels.key_selection import select_keys
from shared.tracks.compression.kernels.window_mass import TABLE_START, TILE, CachedSequences, window_mass
from shared.tracks.compression.layout import Holding
from shared.tracks.compression.selection import Budget

NUM_BEFORE, MOST_WORKSPACES = 2, 16
"""How many times the launches of a workspace run before they are recorded, and the maximum number of workspaces kept;
one more clears them all."""
logger = logging.getLogger("infer.engine")


def sent(numbers: np.ndarray, device: torch.device) -> Tensor:
    """Numbers in transit to the device."""
    array = torch.from_numpy(numbers)
    return array.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else array


@contextmanager
def beside(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Runs work on its own stream, after earlier work and concurrently with later work."""
    if stream is None:
        yield
        return
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    with torch.cuda.stream(stream):
        yield


@contextmanager
def before(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Runs work after that of ``stream``, concurrently with earlier work of the current stream and before its later
    work."""
    if stream is None:
        yield
        return
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        torch.cuda.current_stream(stream.device).wait_stream(stream)


@dataclass(frozen=True)
class CachedKeys:
    """The measures of the sequences' keys, a ``KeyMeasures``. The fields match the arguments of ``window_mass``;
    ``num_queries`` is the window's.
    """

    ring: Tensor
    keys: Tensor
    sequences: CachedSequences
    num_queries: int
    scale: float

    def mass(self, num_queries: int) -> Tensor:
        return window_mass(self.ring, self.keys, self.sequences, min(num_queries, self.num_queries), self.scale)

    def redundancy(self, threshold: float) -> Tensor:
        return key_redundancy(self.keys, self.sequences, threshold)


def num_tiles(sequence: Holding) -> int:
    """The number of ``window_mass`` tiles that the longest head fills."""
    return -(-(sequence.num_tail + (0 if sequence.packed is None else sequence.packed.most)) // TILE)


class Workspace:
    """Fixed buffers for ``num`` sequences, whose heads have at most ``capacity`` tokens each.

    Args:
        memory: keys or values, ``[L, blocks, block_size, Hkv, D]``.
        ends: as in ``KeptTokens``.
    """

    def __init__(self, num: int, capacity: int, memory: Tensor, ends: Tensor) -> None:
        L, _, block_size, Hkv, _ = memory.shape
        width = TABLE_START + capacity // block_size + 2  # the packed part and the tail may each end within a block
        shape, is_pinned = (num, -(-width // 4) * 4), ends.is_cuda  # rows are aligned
        self.uploaded = torch.zeros(shape, dtype=torch.int32, pin_memory=is_pinned)
        self.rows = self.uploaded.numpy()
        numbers = torch.zeros(shape, dtype=torch.int32, device=ends.device) if is_pinned else self.uploaded
        self.sequences = CachedSequences(numbers, ends, capacity)
        self.chosen = torch.empty(num, L, Hkv, capacity, dtype=torch.int32, device=ends.device)
        self.counts = torch.empty(num, L, Hkv, dtype=torch.int32, device=ends.device)
        self.received = torch.empty(num, L, Hkv, dtype=torch.int32, pin_memory=is_pinned)  # the counts, on the host
        self.arrived = torch.cuda.Event() if is_pinned else None
        self.graph: torch.cuda.CUDAGraph | None = None  # of a choice
        self.num_choices = 0

    def enter(self, sequences: Sequence[Holding]) -> None:
        """Send the sequences' locations to the device; waits for the previous choice, which is normally complete."""
        if self.arrived is not None:
            self.arrived.synchronize()
        for row, one in zip(self.rows, sequences, strict=True):
            row[:TABLE_START] = one.row, one.num_tokens, one.num_tail, one.num_packed_slots
            row[TABLE_START : TABLE_START + len(one.table)] = one.table
        if self.arrived is not None:
            self.sequences.numbers.copy_(self.uploaded, non_blocking=True)

    def leave(self) -> None:
        """Send the counts to the host."""
        self.num_choices += 1
        self.received.copy_(self.counts, non_blocking=True)
        if self.arrived is not None:
            record(self.arrived, self.sequences.numbers.get_device())


class Selected:
    """The keys that the heads of the sequences will keep; valid until the workspace is reused."""

    def __init__(self, workspace: Workspace, holdings: Sequence[Holding]) -> None:
        self.workspace, self.holdings, self.number = workspace, holdings, workspace.num_choices

    def index(self, holding: Holding) -> int | None:
        """Which of the sequences has the tokens of ``holding``, even if they have moved since; None if there is
        none."""
        for i, one in enumerate(self.holdings if self.number == self.workspace.num_choices else ()):
            if one.row == holding.row and one.packed is holding.packed and one.length == holding.length:
                return i
        return None

    def precede(self) -> None:
        """Make later launches wait for this selection."""
        if self.workspace.arrived is not None:
            torch.cuda.current_stream(self.workspace.sequences.numbers.device).wait_event(self.workspace.arrived)

    def wait(self, i: int) -> Integers:
        """Wait for the device and return how many tokens each head of sequence ``i`` keeps, [layers, Hkv]."""
        if self.workspace.arrived is not None:
            self.workspace.arrived.synchronize()
        return self.workspace.received[i].numpy().astype(np.int64)


class HeadSelector:
    """Chooses what all heads keep.

    Args:
        ring, keys, scale: as for :func:`shared.tracks.compression.kernels.window_mass.window_mass`.
        windows: as for :func:`shared.tracks.compression.kernels.key_selection.select_keys`.
        ends: as in ``KeptTokens``.
        is_recording: whether the launches may be recorded.
    """

    def __init__(
        self,
        ring: Tensor,
        keys: Tensor,
        ends: Tensor,
        windows: Tensor,
        compressor: BatchedCompressor,
        budget: Budget,
        scale: float,
        is_recording: bool = True,
    ) -> None:
        self.ring, self.keys, self.ends, self.windows, self.scale = ring, keys, ends, windows, scale
        self.compressor, self.budget = compressor, budget
        self.p = torch.tensor([budget.p], dtype=torch.float64, device=keys.device)
        self.stream = torch.cuda.Stream(keys.device) if keys.is_cuda else None
        self.workspaces: dict[tuple[int, int, int], Workspace] = {}  # by number of sequences, queries, and capacity
        self.is_recording = is_recording and keys.is_cuda
        self.graph_memory = torch.cuda.graph_pool_handle() if self.is_recording else None

    def select(self, sequences: Sequence[Holding], w: int) -> Selected:
        """Choose for all layers and heads at once, from the last w queries; runs after the device's current work."""
        key = len(sequences), w, max(map(num_tiles, sequences)) * TILE
        with beside(self.stream):
            workspace = self._workspace(key, all(one.packed is not None for one in sequences))
            workspace.enter(sequences)
            if workspace.graph is None:
                self.choose(workspace, w)
            else:
                workspace.graph.replay()
            workspace.leave()
            selected = Selected(workspace, sequences)
            if self.is_recording and workspace.num_choices == NUM_BEFORE and key in self.workspaces:
                self._record(workspace, w)
            return selected

    def choose(self, workspace: Workspace, w: int) -> None:
        """The launches of one selection."""
        keys = CachedKeys(self.ring, self.keys, workspace.sequences, w, self.scale)
        mass = keys.mass(w)
        attention = mass.mean(-2)
        attention /= attention.sum(-1, keepdim=True)
        scores = self.compressor.of_all(keys, mass)
        arguments = workspace.sequences, self.windows, self.budget, self.p
        select_keys(scores, attention, *arguments, out=(workspace.chosen, workspace.counts))

    def _workspace(self, key: tuple[int, int, int], is_kept: bool) -> Workspace:
        """The workspace for a number of sequences, queries and tokens; a workspace that is not kept is used once."""
        workspace = self.workspaces.get(key)
        if workspace is None:
            num, _, capacity = key
            workspace = Workspace(num, capacity, self.keys, self.ends)
            if is_kept and len(self.workspaces) == MOST_WORKSPACES:
                self.workspaces.clear()
                self.graph_memory = torch.cuda.graph_pool_handle() if self.is_recording else None
            if is_kept:
                self.workspaces[key] = workspace
        return workspace

    def _record(self, workspace: Workspace, w: int) -> None:
        """Record a workspace's launches for its next selections; if that fails, log why and keep launching."""
        try:
            workspace.graph, _ = recorded(lambda: self.choose(workspace, w), self.graph_memory, self.stream)
        except Exception as error:
            self.is_recording = False
            logger.warning("compressions are launched, since they could not be recorded: %s", error, exc_info=error)
