"""A checkpoint of which a rank reads only its part. Introduced in phase 12.1.

Invariant: shapes and tensors are those of the rank's part; the rest of a matrix is not read.
"""

from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from shared.loading.checkpoint import Checkpoint
from shared.tracks.ranks.cut import ROWS, Cut, ModelCut


class WatchedCheckpoint(Checkpoint):
    """As :class:`Checkpoint`; ``check`` is called before each tensor is read, and raises if another rank is lost."""

    def __init__(self, folder: Path, check: Callable[[], None]) -> None:
        super().__init__(folder)
        self.check = check

    def tensor(self, name: str) -> Tensor:
        self.check()
        return super().tensor(name)


class CutCheckpoint(Checkpoint):
    """As :class:`Checkpoint`, cut by ``cut``; ``check`` as in :class:`WatchedCheckpoint`."""

    def __init__(self, folder: Path, cut: ModelCut, check: Callable[[], None] = lambda: None) -> None:
        super().__init__(folder)
        self.cut, self.check = cut, check

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor that is not as large as config.json says keeps its shape."""
        shape, cut = super().shape(name), self._cut(name)
        if cut is None:
            return shape
        return tuple(len(cut.part) if dim == cut.dim else size for dim, size in enumerate(shape))

    def tensor(self, name: str) -> Tensor:
        """A part of a tensor is not mapped but copied."""
        self.check()
        cut = self._cut(name)
        if cut is None:
            return super().tensor(name)
        whole, part = self._files[self._file_of[name]].get_slice(name), slice(cut.part.start, cut.part.stop)
        return whole[part] if cut.dim == ROWS else whole[:, part].contiguous()

    def _cut(self, name: str) -> Cut | None:
        """The cut of a tensor; None for the bias of a row-parallel matrix, of which each rank has all."""
        cut, shape = self.cut.of(name), super().shape(name)
        is_there = cut is not None and cut.dim < len(shape) and shape[cut.dim] == cut.total
        return cut if is_there and name.endswith((".weight", ".bias")) else None
