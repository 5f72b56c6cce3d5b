"""Pads steps to buckets, so that they can be captured. Introduced in phase 9.

The arrays of a step are padded to its bucket, and the launches of a layer are those of the bucket, whatever the step;
the planner (:mod:`shared.cache.layout.bucket_planner`) tells the attention about them. Invariant: a padding token is
written to no slot, and its queries, attended values and hidden states are never read by another token.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shared.cache.layout.bucket_planner import BucketPlanner
from shared.cache.layout.paged import PagedSizes
from shared.cache.view.attention import Arrays, NoPadding, Padding, PagedAttentionProtocol
from shared.cache.view.block_storage import BlockStorage
from shared.cache.view.paged_attention import paged_or_operations
from shared.cache.view.planned_attention import PlannedAttention, is_planned, planner_arguments
from shared.engine.batch import Batch
from shared.engine.config import EngineConfig
from shared.engine.executor.buckets import Bucket, Buckets
from shared.errors import ConfigError
from shared.kernels.launch import launches
from shared.kernels.sampling.next_token import next_token
from shared.models.causal_lm import CausalLM
from shared.models.config import ModelConfig

OF_TOKENS: Mapping[str, int] = {"token_ids": 0, "positions": 0, "offsets": -1}
"""What the arrays of the new tokens are padded with; a negative slot is not written."""
OF_SEQUENCES = ("lengths", "table_starts", "prompt_lengths", "prompt_table_starts")
"""Padded with zeros: an empty array would have no address, which a capture would record."""

CAPTURED_CHUNK, NARROW, NARROW_CAPTURED_CHUNK = 2048, 2048, 6144
"""Tokens of the largest captured chunk, unless ``prefill_chunk_size`` says otherwise, and of the largest one of a model
whose hidden size is at most ``NARROW``. Computing more than the former takes the GPU longer than launching takes the
host; no default chunk has more than the latter."""


class BucketPadding:
    """Pads steps to ``buckets``; see :class:`shared.cache.view.attention.Padding`.

    Args:
        paddings: a full batch of padding for each bucket, the largest first.
        block_size, stride: the slots per block, and the elements per token, for ``advance``.
        of_tokens, of_sequences: the arrays that are padded.
    """

    def __init__(
        self,
        buckets: Buckets,
        paddings: Sequence[Batch],
        block_size: int,
        stride: int,
        of_tokens: Mapping[str, int] = OF_TOKENS,
        of_sequences: Sequence[str] = OF_SEQUENCES,
    ) -> None:
        self.buckets, self.paddings, self.block_size, self.stride = buckets, paddings, block_size, stride
        self.of_tokens, self.of_sequences = of_tokens, {*of_sequences}

    def bucket_of(self, batch: Batch) -> Bucket | None:
        return self.buckets.smallest(len(batch), batch.num_tokens)

    def pad(self, arrays: Arrays, bucket: Bucket | None) -> None:
        if bucket is None or (bucket.is_decode and len(arrays["token_ids"]) == bucket.num_tokens):
            return
        for name in arrays.keys() & self.of_tokens.keys():
            arrays[name] = padded(arrays[name], bucket.num_tokens, self.of_tokens[name])
        for name in arrays.keys() & self.of_sequences:
            arrays[name] = padded(arrays[name], bucket.num_sequences)
        if not bucket.is_decode:
            arrays["logit_rows"] = padded(arrays["logit_rows"], bucket.num_tokens)

    def advance(self, sent: Mapping[str, Tensor]) -> None:
        """On the device: :func:`shared.kernels.sampling.next_token.next_token`."""
        names = ("token_ids", "positions", "offsets", "lengths", "table_starts", "tables", "sequence_rows")
        next_token(*(sent[name] for name in names), block_size=self.block_size, stride=self.stride)


def bucket_attention(
    config: EngineConfig, model: CausalLM, sizes: PagedSizes, storage: BlockStorage
) -> tuple[PagedAttentionProtocol, Padding]:
    """See :data:`shared.cache.paged_memory.MakeAttention`."""
    buckets = buckets_of(config, model, sizes.max_seq_len)
    if not is_planned(storage, config.attention_backend):
        return paged_or_operations(model.config, sizes, storage, config.attention_backend), NoPadding()
    return planned_in_buckets(model.config, sizes, model.dtype, storage, buckets)


def planned_in_buckets(
    config: ModelConfig,
    sizes: PagedSizes,
    dtype: torch.dtype,
    storage: BlockStorage,
    buckets: Buckets,
    has_masks: bool = False,
    *arrays: Any,
) -> tuple[PlannedAttention, BucketPadding]:
    """Planned attention whose steps are padded; ``arrays``: the last arguments of :class:`BucketPadding`."""
    planner = BucketPlanner(**planner_arguments(config, dtype, storage), has_masks=has_masks, buckets=buckets)
    paddings = [planner.padding(bucket, sizes.block_size) for bucket in reversed(buckets.decode + buckets.mixed)]
    arguments = buckets, paddings, sizes.block_size, config.num_kv_heads * config.head_dim
    return PlannedAttention(planner, sizes, storage), BucketPadding(*arguments, *arrays)


def buckets_of(config: EngineConfig, model: CausalLM, max_seq_len: int) -> Buckets:
    """The buckets of captured steps; none if steps are not captured. Raises ConfigError for buckets on a CPU."""
    if config.use_cuda_graphs and not launches(model.norm.weight):
        raise ConfigError("use_cuda_graphs is True and the device is cpu; CUDA graphs need a GPU: leave it out.")
    if not config.is_on("use_cuda_graphs") or not launches(model.norm.weight):
        return Buckets((), ())
    by_default = NARROW_CAPTURED_CHUNK if model.config.hidden_size <= NARROW else CAPTURED_CHUNK
    chunk = by_default if config.prefill_chunk_size is None else config.prefill_chunk_size
    most_tokens = min(config.max_batch_size + chunk, config.most_tokens_of_a_step(max_seq_len))
    return replace(Buckets.of(config.max_batch_size, most_tokens), is_required=config.use_cuda_graphs is True)


def padded(array: NDArray[Any], length: int, value: int = 0) -> NDArray[Any]:
    """The array padded with ``value`` to ``length``; the array itself if it is already that long."""
    if len(array) == length:
        return array
    result = np.full(length, value, array.dtype)
    result[: len(array)] = array
    return result
