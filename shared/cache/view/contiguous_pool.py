"""The model's view of a contiguous pool: one write and one attention launch for all sequences. Introduced in phase 4.

Layout ``[layer, region, Hkv, capacity, D]``: each layer's keys are one tensor, in which a token is an offset, so one
launch can write to all regions and one can read from them. Each layer calls ``kv_write`` once, and ``flash`` once for
the decoding sequences, which are first. Prompts attend with PyTorch's operation, sequence by sequence. On a CPU every
sequence does: launches are cheap there compared to the memory that they read, and a sequence's attention is bitwise the
same in every batch.

Invariant: in a decode step the results of :meth:`ContiguousPoolView.write` and ``attend`` are buffers of the view,
valid until the next layer's call, at the same addresses for the same number of sequences.
"""

from typing import Any, cast

import numpy as np
import torch
from numpy.typing import DTypeLike
from torch import Tensor

from shared.cache.view.contiguous import kv_bytes
from shared.cache.view.interface import StepInputs, step_arrays, step_ranges
from shared.engine.batch import Batch
from shared.engine.executor.staging import Staging
from shared.kernels.attention.decode_attention import DecodeWorkspace, decode_attention
from shared.kernels.attention.kv_write import NormAndRotation, kv_write
from shared.kernels.launch import check_head_size, launches
from shared.loading.placement import check_memory
from shared.models.config import ModelConfig
from shared.models.tokens import QueryKeyTransform
from shared.ops.attention import ATTENTION_BACKENDS


class ContiguousPoolView:
    """Keys and values of ``num_regions`` regions of ``capacity`` tokens; see ``BatchView``.

    Args:
        max_tokens: the maximum number of new tokens in a step.
        backend: a value of ``EngineConfig.attention_backend`` up to ``flash``, which is the default.

    Raises ConfigError if the device has too little memory, or ``flash`` has no kernel for the model's head size.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_regions: int,
        capacity: int,
        max_tokens: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        backend: str | None = None,
    ) -> None:
        backend = backend or "flash"
        device = torch.device(device)
        shape = (config.num_layers, num_regions, config.num_kv_heads, capacity, config.head_dim)
        self.num_bytes = kv_bytes(config, num_regions * capacity, dtype)
        what = f"A pool for max_batch_size = {num_regions} requests of {capacity} tokens"
        check_memory(self.num_bytes, device, what)
        self.keys = torch.empty(shape, dtype=dtype, device=device)
        self.values = torch.empty(shape, dtype=dtype, device=device)
        self.attention = ATTENTION_BACKENDS["sdpa" if backend == "flash" else backend]
        self.is_launching = launches(self.keys)
        self.is_flash = self.is_launching and backend == "flash"
        self.num_kv_heads, self.capacity, self.head_dim = config.num_kv_heads, capacity, config.head_dim
        self.head_stride = capacity * config.head_dim
        self.region_stride = config.num_kv_heads * self.head_stride
        self.layer_keys, self.layer_values = self.keys.unbind(0), self.values.unbind(0)
        if self.is_launching:
            self.queries = torch.empty(num_regions, config.num_heads, config.head_dim, dtype=dtype, device=device)
            self.attended = torch.empty_like(self.queries)
        else:
            self.key_rows = self.keys.view(config.num_layers, -1, config.head_dim).unbind(0)
            self.value_rows = self.values.view(config.num_layers, -1, config.head_dim).unbind(0)
        if self.is_flash:
            check_head_size(config.head_dim)
            arguments = (config.num_heads, config.num_kv_heads, config.head_dim, capacity, device)
            self.workspaces = [  # for 1, 2, 4, … sequences: the fewer sequences, the more programs for each
                DecodeWorkspace.of(1 << n, *arguments) for n in range((num_regions - 1).bit_length() + 1)
            ]
        num_offsets = max_tokens if self.is_launching else max_tokens * config.num_kv_heads
        of_regions: dict[str, tuple[int, DTypeLike]] = dict.fromkeys(("regions", "lengths"), (num_regions, np.int32))
        self.staging = Staging(device, {**of_regions, **step_ranges(max_tokens), "offsets": (num_offsets, np.int64)})

    def load(self, batch: Batch) -> StepInputs:
        layout, D = batch.layout, self.head_dim
        self.is_decode = batch.is_decode
        region, index = np.divmod(layout.slot_mapping, self.capacity)
        offsets = region * self.region_stride + index * D  # [T], offset of each token's first head, in elements
        arrays = {"regions": layout.rows, "lengths": layout.lengths}
        if not self.is_launching:
            offsets = (
                offsets[:, None] + self.head_stride * np.arange(self.num_kv_heads)
            ).ravel() // D  # rows [T · Hkv]
        sent = self.staging.send({**arrays, **step_arrays(batch), "offsets": offsets})
        self.regions, self.lengths, self.offsets = sent["regions"], sent["lengths"], sent["offsets"]
        if self.is_launching and self.is_decode:  # buffers for the results of every layer
            self.step_queries, self.step_attended = self.queries[: len(batch)], self.attended[: len(batch)]
        n = layout.num_decoding if self.is_flash else 0  # the others attend one by one
        self.num_launched, self.decoding = n, (self.regions[:n], self.lengths[:n])
        self._cut(layout.rows[n:].tolist(), layout.num_cached[n:].tolist(), layout.lengths[n:].tolist())
        self.num_new = batch.num_new_tokens[n:].tolist()
        return StepInputs.of(sent)

    def _cut(self, regions: list[int], num_cached: list[int], ends: list[int]) -> None:
        """Slice the keys and values that each sequence attends over, for all layers; views of the cache."""
        self.num_cached = num_cached
        sequences = list(zip(regions, ends, strict=True))
        self.sequence_keys = [self.keys[:, region, :, :end].unbind(0) for region, end in sequences]
        self.sequence_values = [self.values[:, region, :, :end].unbind(0) for region, end in sequences]

    def write(self, layer: int, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, qk: QueryKeyTransform) -> Tensor:
        if not self.is_launching:
            q, k = qk(q, k, positions)
            self.key_rows[layer].index_copy_(0, self.offsets, k.reshape(-1, self.head_dim))
            self.value_rows[layer].index_copy_(0, self.offsets, v.reshape(-1, self.head_dim))
            return q
        memory = self.layer_keys[layer], self.layer_values[layer], self.offsets, self.head_stride
        out = self.step_queries if self.is_decode else None
        return kv_write(q, k, v, positions, cast(NormAndRotation, qk), *memory, out=out)

    def attend(
        self, layer: int, q: Tensor, *, scale: float, window: int | None = None, softcap: float | None = None
    ) -> Tensor:
        """A sliding-window layer reads only keys inside the window."""
        attended, n = [], self.num_launched
        limits: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap}
        if n:
            memory = self.layer_keys[layer], self.layer_values[layer], *self.decoding
            workspace = self.workspaces[(n - 1).bit_length()]
            if self.is_decode:
                return decode_attention(q, *memory, **limits, workspace=workspace, out=self.step_attended)
            attended.append(decode_attention(q[:n], *memory, **limits, workspace=workspace, out=None))
        for b, queries in enumerate(q[n:].split(self.num_new)):
            k, v = self.sequence_keys[b][layer], self.sequence_values[b][layer]
            if window is not None and self.num_cached[b] >= window:
                first = self.num_cached[b] + 1 - window
                k, v = k[:, first:], v[:, first:]
            attended.append(self.attention(queries, k, v, **limits))
        return torch.cat(attended)
