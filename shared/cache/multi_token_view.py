"""The model's view of a paged KV cache during a step with mask tokens. Introduced in phase 11.1.

Mask tokens lie behind a request's real tokens, and see some of them and some of each other. The planned kernel derives
what each token sees from k, one number for each sequence. PyTorch's operations get the mask of
:func:`shared.ops.multi_token.visible_with_masks`, over the keys of one sequence.

Invariants: those of :class:`shared.cache.bucket_view.BucketView`; a step without mask tokens has no gate, unless it is
captured: then its gate is closed.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray

from shared.cache.bucket_planner import BucketPlanner
from shared.cache.bucket_view import BucketView, padded
from shared.cache.paged_layout import PagedLayout, PagedSizes
from shared.cache.view import StepInputs
from shared.engine.batch import Batch
from shared.engine.buckets import Buckets
from shared.engine.multi_token_batch import MultiTokenBatch
from shared.errors import ConfigError
from shared.models.config import ModelConfig
from shared.models.lora import FIRST_MASK
from shared.ops.multi_token import masked_attention, visible_with_masks


class MultiTokenView(BucketView):
    """Keys and values in blocks, with mask tokens among the new ones; see ``BatchView``.

    Raises ConfigError as ``PagedView`` does, and for the backend ``flash`` on a GPU, whose kernels have no masks.
    """

    def __init__(
        self,
        config: ModelConfig,
        sizes: PagedSizes,
        dtype: torch.dtype,
        device: torch.device | str,
        backend: str | None,
        buckets: Buckets,
    ) -> None:
        super().__init__(config, sizes, dtype, device, backend, buckets)
        if self.is_flash and self.planner is None:
            raise ConfigError("attention_backend is 'flash', whose kernels have no mask tokens; choose 'planned'.")
        if self.planner is not None:
            planner = self.planner = replace(cast(BucketPlanner, self.planner), has_masks=True)
            bucket_sizes = reversed(buckets.decode + buckets.mixed)
            self.paddings = [planner.padding(bucket, sizes.block_size) for bucket in bucket_sizes]

    def _places(self, is_decode: bool, max_tokens: int) -> dict[str, tuple[int, DTypeLike]]:
        places = super()._places(is_decode, max_tokens)
        tables = places.pop("tables")
        own: dict[str, tuple[int, DTypeLike]] = {
            "num_masks": (self.sizes.max_sequences, np.int32),
            "gate": (max_tokens, np.float32),
        }
        return places | own | {"tables": tables}

    def load(self, batch: Batch) -> StepInputs:
        """See ``BatchView``; mask tokens open the gate."""
        counts = batch.num_masks if isinstance(batch, MultiTokenBatch) else np.zeros(0, np.int64)
        self.num_masks = padded(counts, len(batch))  # of each sequence
        self.masks: dict[tuple[int | None, int], torch.Tensor] = {}  # by window and sequence
        return super().load(batch)

    def _arrays(self, batch: Batch, layout: PagedLayout) -> dict[str, NDArray[Any]]:
        arrays = super()._arrays(batch, layout)
        if self.num_masks.any() or (self.bucket is not None and not self.bucket.is_decode):
            arrays["gate"] = arrays["token_ids"] >= FIRST_MASK
        if not self.is_flash or self.is_decode:
            return arrays
        of_prompts = self.num_masks[self.num_decoding :]
        length = len(of_prompts) if self.bucket is None else self.bucket.num_sequences
        return arrays | {"num_masks": padded(of_prompts, length)}

    def _receive(self, layout: PagedLayout, sent: Mapping[str, torch.Tensor]) -> None:
        super()._receive(layout, sent)
        if not self.is_decode:
            self.prompt_masks = sent["num_masks"]

    def _attend_prompts(self, layer: int, q: torch.Tensor, out: torch.Tensor, about: dict[str, Any]) -> None:
        super()._attend_prompts(layer, q, out, about | {"num_masks": self.prompt_masks})

    def _attend_gathered(
        self, layer: int, q: torch.Tensor, scale: float, window: int | None, softcap: float | None
    ) -> torch.Tensor:
        if not self.num_masks.any():
            return super()._attend_gathered(layer, q, scale, window, softcap)
        if window not in self.pieces:
            self.pieces[window] = self._cut(window)
        attended = []
        counts = self.num_masks.tolist()
        for n, (queries, piece) in enumerate(zip(q.split(self.num_new), self.pieces[window], strict=True)):
            k, v = (x.transpose(0, 1) for x in self._gathered(layer, piece))  # [Hkv, S, D]
            if counts[n] == 0:
                attended.append(self.attention(queries, k, v, scale=scale, window=window, softcap=softcap))
                continue
            mask = self.masks.get((window, n))
            if mask is None:
                num_real = len(queries) // (1 + counts[n])
                about = (piece.end - piece.start - len(queries), num_real, counts[n], window, q.device)
                mask = self.masks[window, n] = visible_with_masks(*about)
            attended.append(masked_attention(queries, k, v, mask, scale=scale, softcap=softcap))
        return torch.cat(attended)
