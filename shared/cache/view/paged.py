"""The model's view of a paged KV cache during a step. Introduced in phase 6.

A view is a storage of keys and values, an attention that reads it, and the padding of its steps, put together by
:mod:`shared.cache.paged_memory`. With kernels, a layer launches ``kv_write`` and then the launches of its attention.

Invariant: in a decode step the results of :meth:`PagedView.write` and ``attend`` are buffers of the view, valid until
the next layer's call, at the same addresses for the same number of sequences; a step's copies precede its writes.
"""

from typing import cast

import numpy as np
import torch
from torch import Tensor

from shared.cache.layout.paged import PagedLayout, PagedSizes
from shared.cache.view.attention import NoPadding, Padding, PagedAttentionProtocol
from shared.cache.view.block_storage import BlockStorage
from shared.cache.view.interface import StepInputs, step_arrays, step_ranges
from shared.engine.batch import Batch
from shared.engine.executor.staging import Staging
from shared.kernels.attention.kv_write import NormAndRotation, kv_write
from shared.kernels.launch import launches
from shared.models.config import ModelConfig
from shared.models.tokens import QueryKeyTransform


class PagedView:
    """Keys and values in blocks; see ``BatchView``, and with buckets ``BucketedView``.

    Args:
        dtype: the model's.
    """

    def __init__(
        self,
        config: ModelConfig,
        sizes: PagedSizes,
        dtype: torch.dtype,
        storage: BlockStorage,
        attention: PagedAttentionProtocol,
        padding: Padding | None = None,
    ) -> None:
        self.config, self.block_size = config, sizes.block_size
        self.storage, self.attention, self.padding = storage, attention, padding or NoPadding()
        self.keys, self.values, self.num_bytes = storage.keys, storage.values, storage.num_bytes
        self.buckets, self.paddings, self.bucket = self.padding.buckets, self.padding.paddings, None
        self.is_launching, device = launches(self.keys), self.keys.device
        # distance between slots, in elements
        self.stride = config.num_kv_heads * config.head_dim if self.is_launching else 1
        if self.is_launching:
            shape = sizes.max_sequences, config.num_heads, config.head_dim
            self.queries = torch.empty(shape, dtype=dtype, device=device)
            self.attended = torch.empty_like(self.queries)
        self.buffers: dict[int, tuple[Tensor, Tensor]] = {}  # their first rows, by number of rows
        # Decode steps are small: a separate staging buffer keeps their copy from including the space reserved for
        # prompts.
        self.staging = {
            is_decode: Staging(
                device, {**step_ranges(most), "offsets": (most, np.int64), **attention.staged(is_decode, most)}
            )
            for is_decode, most in ((True, sizes.max_sequences), (False, sizes.max_tokens))
        }

    def load(self, batch: Batch) -> StepInputs:
        """The tokens are padded to the step's bucket, if there is one."""
        layout = cast(PagedLayout, batch.layout)
        self.storage.copy(layout.copies)
        self.bucket = self.padding.bucket_of(batch)
        arrays = {**step_arrays(batch), "offsets": layout.slot_mapping * self.stride}
        arrays |= self.attention.arrays(batch, layout)
        self.padding.pad(arrays, self.bucket)
        self.sent = self.staging[batch.is_decode].send(arrays)
        self.offsets = self.sent["offsets"]
        self.step_queries: Tensor | None = None
        self.step_attended: Tensor | None = None
        if self.is_launching and batch.is_decode:  # buffers for the results of every layer
            self._take_buffers(len(self.offsets))
        self.attention.receive(batch, layout, self.sent)
        return StepInputs.of(self.sent)

    def _take_buffers(self, num_rows: int) -> None:
        """Use the first rows of the buffers; the slices are kept, since slicing a tensor costs more than a lookup."""
        known = self.buffers.get(num_rows)
        if known is None:
            known = self.buffers[num_rows] = self.queries[:num_rows], self.attended[:num_rows]
        self.step_queries, self.step_attended = known

    def write(self, layer: int, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, qk: QueryKeyTransform) -> Tensor:
        storage = self.storage
        if not self.is_launching:
            q, k = qk(q, k, positions)
            storage.write(layer, k, v, self.offsets)
            return q
        memory = storage.layer_keys[layer], storage.layer_values[layer], self.offsets, self.config.head_dim
        options = storage.arguments[layer]
        return kv_write(q, k, v, positions, cast(NormAndRotation, qk), *memory, out=self.step_queries, **options)

    def attend(
        self, layer: int, q: Tensor, *, scale: float, window: int | None = None, softcap: float | None = None
    ) -> Tensor:
        options = {"scale": scale, "window": window, "softcap": softcap}
        return self.attention.attend(layer, q, options, self.step_attended)

    def advance(self) -> None:
        self.padding.advance(self.sent)
