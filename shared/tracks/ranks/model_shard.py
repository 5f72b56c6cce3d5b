"""Which rows or columns of each tensor a rank has, and a checkpoint that reads only those. Introduced in phase 12.1.

Queries, keys and values are sharded separately, each by its own heads; gate and up are sharded by the same columns of
the MLP. An 8- or 4-bit matrix is sharded together with its block scales, and the MLP at block boundaries.

Invariant: in a rank's shard, an 8- or 4-bit matrix has the same numbers and scales as the whole one.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from shared.errors import ConfigError
from shared.loading.checkpoint import Checkpoint
from shared.models.config import ModelConfig
from shared.quantization.weight import RUN, QuantizedWeight, pack_nibbles, unpack_nibbles
from shared.tracks.ranks.shard import Shard

ROWS, COLUMNS = 0, 1
LEAST_BLOCK = 32  # the smallest that the kernels support


@dataclass(frozen=True)
class TensorShard:
    """A rank's range along one dimension of a matrix that has ``total`` there."""

    dim: int
    part: range
    total: int


@dataclass(frozen=True)
class ModelShard:
    """The shards of all tensors of a model.

    Args:
        config: the whole model's config.
        multiple: the MLP is divided at multiples of this number.
    """

    shard: Shard
    config: ModelConfig
    multiple: int = 1

    def of(self, name: str) -> TensorShard | None:
        """The shard of a matrix, by its name in the model or in the checkpoint; None if each rank has all of it."""
        queries, keys = self.shard.heads(self.config)
        D, config = self.config.head_dim, self.config
        module = re.sub(r"\.(weight|bias)$", "", name).rpartition(".")[2]
        if module == "q_proj":
            return TensorShard(ROWS, _times(queries, D), config.num_heads * D)
        if module in ("k_proj", "v_proj"):
            return TensorShard(ROWS, _times(keys, D), config.num_kv_heads * D)
        if module == "o_proj":
            return TensorShard(COLUMNS, _times(queries, D), config.num_heads * D)
        columns = self.shard.part(config.intermediate_size, self.multiple)
        if module in ("gate_proj", "up_proj"):
            return TensorShard(ROWS, columns, config.intermediate_size)
        if module == "down_proj":
            return TensorShard(COLUMNS, columns, config.intermediate_size)
        if module in ("embed_tokens", "lm_head", "embedding", "head"):
            return TensorShard(ROWS, self.shard.part(config.vocab_size), config.vocab_size)
        return None

    def whole(self, name: str, shape: tuple[int, int]) -> tuple[int, int]:
        """The shape of the whole matrix of which a rank's shard has ``shape``."""
        shard = self.of(name)
        if shard is None:
            return shape
        rows, columns = shape
        return (shard.total, columns) if shard.dim == ROWS else (rows, shard.total)

    def part(self, name: str, weight: QuantizedWeight) -> QuantizedWeight:
        """The rank's shard of a whole matrix."""
        shard = self.of(name)
        return weight if shard is None else shard_weight(weight, shard)


class WatchedCheckpoint(Checkpoint):
    """As :class:`Checkpoint`; ``check`` is called before each tensor is read, and raises if another rank is lost."""

    def __init__(self, folder: Path, check: Callable[[], None]) -> None:
        super().__init__(folder)
        self.check = check

    def tensor(self, name: str) -> Tensor:
        self.check()
        return super().tensor(name)


class ShardCheckpoint(Checkpoint):
    """Like :class:`Checkpoint`, sharded by ``shard``; ``check`` as in :class:`WatchedCheckpoint`."""

    def __init__(self, folder: Path, shard: ModelShard, check: Callable[[], None] = lambda: None) -> None:
        super().__init__(folder)
        self.shard, self.check = shard, check

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor that is smaller than config.json says keeps its shape."""
        shape, shard = super().shape(name), self._shard_of(name)
        if shard is None:
            return shape
        return tuple(len(shard.part) if dim == shard.dim else size for dim, size in enumerate(shape))

    def tensor(self, name: str) -> Tensor:
        """Part of a tensor is copied, not mapped."""
        self.check()
        shard = self._shard_of(name)
        if shard is None:
            return super().tensor(name)
        whole, part = self._files[self._file_of[name]].get_slice(name), slice(shard.part.start, shard.part.stop)
        return whole[part] if shard.dim == ROWS else whole[:, part].contiguous()

    def _shard_of(self, name: str) -> TensorShard | None:
        """The shard of a tensor; None for the bias of a row-parallel matrix, of which each rank has all."""
        shard, shape = self.shard.of(name), super().shape(name)
        is_there = shard is not None and shard.dim < len(shape) and shape[shard.dim] == shard.total
        return shard if is_there and name.endswith((".weight", ".bias")) else None


def shard_weight(weight: QuantizedWeight, shard: TensorShard) -> QuantizedWeight:
    """A range of rows or columns of an 8- or 4-bit matrix, with its scales.

    Rows that do not begin at a block boundary get one scale each; a divided block of columns becomes several blocks
    with the same scale. The range is a copy, so the whole may be freed. Raises ConfigError for columns that would need
    blocks smaller than ``LEAST_BLOCK``.
    """
    begin, end = shard.part.start, shard.part.stop
    if shard.dim == ROWS:
        part = (with_scales_by_row(weight) if begin % weight.rows_per_scale else weight).tile(begin, end)
        zeros = None if part.zeros is None else part.zeros.clone()
        return replace(part, values=part.values.clone(), scales=part.scales.clone(), zeros=zeros)
    group, zeros = weight.columns_per_scale, weight.zeros
    if group == weight.shape[1] and (weight.bits == 8 or (end - begin) % LEAST_BLOCK == 0):  # one scale per row
        scales, own = weight.scales, end - begin
    else:
        own = math.gcd(group, begin, end)
        if own < LEAST_BLOCK:
            raise ConfigError(
                f"A rank's part of a quantized matrix is columns {begin} to {end}, and each {group} columns have a "
                f"scale; parts must begin and end at multiples of {LEAST_BLOCK}. Choose another tensor_parallel_size."
            )
        groups = slice(begin // own, end // own)
        scales = weight.scales.repeat_interleave(group // own, 1)[:, groups].contiguous()
        zeros = None if zeros is None else zeros.repeat_interleave(group // own, 1)[:, groups].contiguous()
    if weight.bits == 8:
        values = weight.values[:, begin:end].contiguous()
    else:
        values = pack_nibbles(unpack_nibbles(weight.values, weight.run)[:, begin:end], min(own, RUN))
    return replace(weight, values=values, scales=scales, zeros=zeros, columns_per_scale=own)


def with_scales_by_row(weight: QuantizedWeight) -> QuantizedWeight:
    """The same matrix with a scale for each row of each block."""

    def spread(of_groups: Tensor | None) -> Tensor | None:
        if of_groups is None:
            return None
        return of_groups.repeat_interleave(weight.rows_per_scale, 0)[: len(weight)]

    scales = spread(weight.scales)
    assert scales is not None
    return replace(weight, scales=scales, zeros=spread(weight.zeros), rows_per_scale=1)


def _times(heads: range, size: int) -> range:
    return range(heads.start * size, heads.stop * size)
