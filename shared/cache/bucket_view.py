"""The model's view of a paged KV cache during a captured step. Introduced in phase 9.

The arrays of a step are padded to its bucket, and the launches of a layer are those of the bucket, whatever the step.
Invariants: those of :class:`shared.cache.prefix_view.PrefixView`; a padding token is written to no slot, and its
queries, attended values and hidden states are never read by another token.
"""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from shared.cache.bucket_planner import BucketPlanner
from shared.cache.paged_layout import PagedLayout, PagedSizes
from shared.cache.prefix_view import PrefixView
from shared.cache.view import StepInputs
from shared.engine.batch import Batch
from shared.engine.buckets import Bucket, Buckets
from shared.kernels.next_token import next_token
from shared.models.config import ModelConfig

OF_TOKENS = {"token_ids": 0, "positions": 0, "places": -1}
"""What the arrays of the new tokens are padded with; a negative place is not written."""
OF_SEQUENCES = ("lengths", "table_starts", "prompt_lengths", "prompt_table_starts")
"""Padded with zeros: an empty array would have no address, which a capture would record."""


class BucketView(PrefixView):
    """Keys and values in blocks, for steps that are padded to ``buckets``; a ``BucketedView`` of the runner."""

    bucket: Bucket | None = None
    paddings: Sequence[Batch] = ()

    def __init__(
        self,
        config: ModelConfig,
        sizes: PagedSizes,
        dtype: torch.dtype,
        device: torch.device | str,
        backend: str | None,
        buckets: Buckets,
    ) -> None:
        super().__init__(config, sizes, dtype, device, backend)
        self.buckets = buckets
        if self.planner is not None:
            self.planner = BucketPlanner(**vars(self.planner), buckets=buckets)
            sizes_of_steps = reversed(buckets.decode + buckets.mixed)
            self.paddings = [self.planner.padding(bucket, sizes.block_size) for bucket in sizes_of_steps]

    def load(self, batch: Batch) -> StepInputs:
        """See ``BatchView``; the tokens are padded to the step's bucket, if there is one."""
        self.bucket = self._bucket_of(batch)
        return super().load(batch)

    def _bucket_of(self, batch: Batch) -> Bucket | None:
        """The bucket to which a step is padded."""
        if self.planner is None:
            return None
        return self.buckets.smallest(len(batch), batch.num_tokens)

    def _arrays(self, batch: Batch, layout: PagedLayout) -> dict[str, NDArray[Any]]:
        arrays = super()._arrays(batch, layout)
        if self.bucket is not None:
            for name, value in OF_TOKENS.items():
                arrays[name] = padded(arrays[name], self.bucket.num_tokens, value)
            for name in arrays.keys() & OF_SEQUENCES:
                arrays[name] = padded(arrays[name], self.bucket.num_sequences)
        return arrays

    def _receive(self, layout: PagedLayout, sent: Mapping[str, torch.Tensor]) -> None:
        super()._receive(layout, sent)
        self.sent = sent
        bucket, planner = self.bucket, cast(BucketPlanner, self.planner)
        if bucket is None:
            return
        self.decode_tiling = planner.decode_tiling(bucket.num_sequences)
        if bucket.is_decode:
            self._take_buffers(bucket.num_tokens)
        else:
            self.prefill_tiling = planner.bucket_prefill_tiling(bucket)

    def advance(self) -> None:
        """Move the loaded decode step on by a token for each sequence, on the device; see :func:`next_token`."""
        names = ("token_ids", "positions", "places", "lengths", "table_starts", "tables", "sequence_rows")
        next_token(*(self.sent[name] for name in names), block_size=self.block_size, stride=self.token_stride)

    def attend(
        self, layer: int, q: torch.Tensor, *, scale: float, window: int | None = None, softcap: float | None = None
    ) -> torch.Tensor:
        """See :class:`shared.models.tokens.KVView`."""
        if self.is_decode or self.bucket is None:
            return super().attend(layer, q, scale=scale, window=window, softcap=softcap)
        about: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap}
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        n = self.bucket.num_sequences
        self._attend_decoding(layer, q[:n], out[:n], about)
        self._attend_prompts(layer, q, out, about)
        return out


def padded(array: NDArray[Any], length: int, value: int = 0) -> NDArray[Any]:
    """The array with ``value`` behind its end, up to ``length``; itself if it is that long."""
    if len(array) == length:
        return array
    result = np.full(length, value, array.dtype)
    result[: len(array)] = array
    return result
