"""Regions as the model sees them during a step: one write and one read for all sequences. Introduced in phase 4.

Which regions a step touches, where its tokens go and how long its sequences are differ from step to step; that is worked
out once a step in numpy and sent in one copy. The layers of a decode step then call ``kv_write`` and ``flash`` once
each, with every sequence of the batch. A step that brings a sequence several tokens, a prompt, attends by PyTorch's
operation, sequence by sequence. On a CPU so does every step: operations are cheap there beside what they read, and a
sequence's attention is the same in every batch, to the last bit.

Invariants: a step writes behind the tokens that the pool has counted and counts none itself, so a step that fails can
be run again; what :meth:`ContiguousPoolView.write` and ``attend`` give in a decode step is the view's own memory, good until
the next layer's call, at the same addresses for the same number of sequences.
"""

from typing import TYPE_CHECKING, cast

import numpy as np
import torch

from shared.cache.fused_contiguous import check_flash_head_size
from shared.engine.batch import Batch
from shared.engine.staging import Staging
from shared.errors import CapacityError
from shared.kernels.decode_attention import DecodeWorkspace, decode_attention
from shared.kernels.kv_write import NormAndRotation, kv_write
from shared.kernels.launch import launches
from shared.models.tokens import QueryKeyTransform, Tokens
from shared.ops.attention import ATTENTION_BACKENDS

if TYPE_CHECKING:
    from shared.cache.contiguous_pool import ContiguousKVCachePool


class ContiguousPoolView:
    """A pool of regions behind the model; see ``BatchView``. Raises ConfigError as ``ContiguousKVCachePool.view``."""

    def __init__(self, pool: "ContiguousKVCachePool", num_heads: int, backend: str | None = None) -> None:
        backend = backend or "flash"
        self.pool = pool
        self.attention = ATTENTION_BACKENDS["sdpa" if backend == "flash" else backend]
        self.is_launching = launches(pool.keys)
        self.is_flash = self.is_launching and backend == "flash"
        self.staging = Staging(pool.keys.device)
        num_layers, num_regions, self.num_kv_heads, capacity, self.head_dim = pool.keys.shape
        self.head_stride = capacity * self.head_dim
        self.region_stride = self.num_kv_heads * self.head_stride
        self.layer_keys, self.layer_values = pool.keys.unbind(0), pool.values.unbind(0)
        if self.is_launching:
            heads = (num_regions, num_heads, self.head_dim)
            self.queries = torch.empty(heads, dtype=pool.keys.dtype, device=pool.keys.device)
            self.attended = torch.empty_like(self.queries)
        else:
            self.key_rows = pool.keys.view(num_layers, -1, self.head_dim).unbind(0)
            self.value_rows = pool.values.view(num_layers, -1, self.head_dim).unbind(0)
        if self.is_flash:
            check_flash_head_size(self.head_dim)
            self.workspaces = [  # for 1, 2, 4, … sequences: the fewer there are, the more programs share one
                DecodeWorkspace.of(1 << n, num_heads, self.num_kv_heads, self.head_dim, capacity, pool.keys.device)
                for n in range((num_regions - 1).bit_length() + 1)
            ]

    def prepare(self, batch: Batch) -> tuple[Tokens, torch.Tensor]:
        """See ``BatchView``; raises CapacityError for tokens that were not granted."""
        pool, num_new, D = self.pool, batch.num_new_tokens, self.head_dim
        self.is_decode = batch.num_tokens == len(num_new)
        regions, past, granted = pool.places(batch.request_ids)  # [B] each
        ends = past + num_new
        if (ends > granted).any():
            raise CapacityError(f"The step would fill {ends.tolist()} tokens of {granted.tolist()} that were granted.")
        # exercise 04.3: where each new token goes
        # hint: a place is an offset in a layer's memory, in numbers: regions lie region_stride apart, tokens of one head D
        # hint: a sequence's first new token goes behind the tokens that it has
        # hint: in a decode step that is all, one token each; else its neighbours follow, D apart
        # hint: np.repeat each sequence's offset over its rows; add D times the row, counted from the sequence's first
        offsets = regions * self.region_stride + past * D  # [B], of each sequence's first new token
        if not self.is_decode:
            first_rows = num_new.cumsum() - num_new
            offsets = np.repeat(offsets - first_rows * D, num_new) + np.arange(batch.num_tokens) * D  # [T]
        # end exercise
        arrays = [batch.token_ids, batch.positions, batch.logit_rows, offsets]
        if self.is_launching:
            arrays += [regions.astype(np.int32), ends.astype(np.int32)]
            ids, positions, logit_rows, self.offsets, self.regions, self.lengths = self.staging.send(arrays)
            if self.is_decode:  # what every layer's results are stored in
                self.step_queries, self.step_attended = self.queries[: len(regions)], self.attended[: len(regions)]
        else:
            arrays[-1] = (offsets[:, None] + self.head_stride * np.arange(self.num_kv_heads)).ravel() // D
            ids, positions, logit_rows, self.rows = self.staging.send(arrays)  # rows [T · Hkv]
        if not (self.is_flash and self.is_decode):
            self._cut(regions.tolist(), past.tolist(), num_new.tolist())
        return Tokens(ids, positions), logit_rows

    def _cut(self, regions: list[int], past: list[int], num_new: list[int]) -> None:
        """What each sequence's new tokens attend over, of all layers together: views into the pool."""
        keys, values = self.pool.keys, self.pool.values
        self.num_past, self.num_new = past, num_new
        ends = [before + new for before, new in zip(past, num_new, strict=True)]
        self.keys = [keys[:, region, :, :end].unbind(0) for region, end in zip(regions, ends, strict=True)]
        self.values = [values[:, region, :, :end].unbind(0) for region, end in zip(regions, ends, strict=True)]

    def write(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        positions: torch.Tensor,
        qk: QueryKeyTransform,
    ) -> torch.Tensor:
        """See :class:`shared.models.tokens.KVView`."""
        if not self.is_launching:
            q, k = qk(q, k, positions)
            self.key_rows[layer].index_copy_(0, self.rows, k.reshape(-1, self.head_dim))
            self.value_rows[layer].index_copy_(0, self.rows, v.reshape(-1, self.head_dim))
            return q
        return kv_write(
            q,
            k,
            v,
            positions,
            cast(NormAndRotation, qk),
            self.layer_keys[layer],
            self.layer_values[layer],
            self.offsets,
            self.head_stride,
            out=self.step_queries if self.is_decode else None,
        )

    def attend(
        self, layer: int, q: torch.Tensor, *, scale: float, window: int | None = None, softcap: float | None = None
    ) -> torch.Tensor:
        """See :class:`shared.models.tokens.KVView`; of a windowed layer only what a new token can see is read."""
        if self.is_flash and self.is_decode:
            return decode_attention(
                q,
                self.layer_keys[layer],
                self.layer_values[layer],
                self.regions,
                self.lengths,
                scale=scale,
                window=window,
                softcap=softcap,
                workspace=self.workspaces[(q.shape[0] - 1).bit_length()],
                out=self.step_attended,
            )
        attended = []
        for b, queries in enumerate(q.split(self.num_new)):
            k, v = self.keys[b][layer], self.values[b][layer]
            if window is not None and self.num_past[b] >= window:
                first = self.num_past[b] + 1 - window
                k, v = k[:, first:], v[:, first:]
            attended.append(self.attention(queries, k, v, scale=scale, window=window, softcap=softcap))
        return torch.cat(attended)
