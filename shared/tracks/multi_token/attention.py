"""Attention over blocks, where some of the new tokens are mask tokens. Introduced in phase 11.1.

Mask tokens come after a request's real tokens, and see some of the real tokens and some of each other. The planned
kernel derives what each token sees from k, one number for each sequence. PyTorch's operations use the mask of
:func:`shared.tracks.multi_token.ops.visible_with_masks`, over the keys of one sequence.

Invariants: a step without mask tokens has no gate; a captured step always has one, closed if there are no mask tokens.
"""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from shared.cache.layout.paged import PagedLayout, PagedSizes
from shared.cache.layout.slots import Integers
from shared.cache.view.attention import Arrays, ArraySpecs, NoPadding, Padding, PagedAttentionProtocol, Scores
from shared.cache.view.block_storage import BlockStorage
from shared.cache.view.bucket_padding import (
    OF_SEQUENCES,
    OF_TOKENS,
    BucketPadding,
    bucket_attention,
    buckets_of,
    padded,
    planned_in_buckets,
)
from shared.cache.view.operations_attention import OperationsAttention
from shared.cache.view.planned_attention import PlannedAttention, is_planned
from shared.engine.batch import Batch
from shared.engine.config import EngineConfig
from shared.errors import ConfigError
from shared.kernels.launch import launches
from shared.models.causal_lm import CausalLM
from shared.tracks.multi_token.batch import MultiTokenBatch
from shared.tracks.multi_token.lora import FIRST_MASK
from shared.tracks.multi_token.ops import masked_attention, visible_with_masks


class MaskTokenAttention:
    """Planned attention with mask tokens; see :class:`shared.cache.view.attention.PagedAttentionProtocol`."""

    def __init__(self, planned: PlannedAttention, padding: BucketPadding) -> None:
        self.planned, self.padding = planned, padding
        self.lay_out, self.attend = planned.lay_out, planned.attend

    def staged(self, is_decode: bool, max_tokens: int) -> ArraySpecs:
        own = {"num_masks": (self.planned.sizes.max_sequences, np.int32), "gate": (max_tokens, np.float32)}
        return own | self.planned.staged(is_decode, max_tokens)

    def arrays(self, batch: Batch, layout: PagedLayout) -> Arrays:
        """Mask tokens open the gate."""
        arrays, num_masks = self.planned.arrays(batch, layout), num_masks_of(batch)
        bucket = self.padding.bucket_of(batch)
        if num_masks.any() or (bucket is not None and not bucket.is_decode):
            arrays["gate"] = batch.token_ids >= FIRST_MASK
        if not batch.is_decode:
            arrays["num_masks"] = num_masks[layout.num_decoding :]
        return arrays

    def receive(self, batch: Batch, layout: PagedLayout, sent: Mapping[str, Tensor]) -> None:
        self.planned.receive(batch, layout, sent)
        if not batch.is_decode:
            self.planned.prompt_arguments = {"num_masks": sent["num_masks"]}


class MaskTokenOperations(PagedAttentionProtocol):
    """PyTorch's operations with mask tokens; see :class:`shared.cache.view.attention.PagedAttentionProtocol`."""

    def __init__(self, operations: OperationsAttention) -> None:
        self.operations = operations

    def staged(self, is_decode: bool, max_tokens: int) -> ArraySpecs:
        return {"gate": (max_tokens, np.float32)}

    def arrays(self, batch: Batch, layout: PagedLayout) -> Arrays:
        """Mask tokens open the gate."""
        return {"gate": batch.token_ids >= FIRST_MASK} if num_masks_of(batch).any() else {}

    def receive(self, batch: Batch, layout: PagedLayout, sent: Mapping[str, Tensor]) -> None:
        self.operations.receive(batch, layout, sent)
        self.num_masks = num_masks_of(batch).tolist()
        self.masks: dict[tuple[int | None, int], Tensor] = {}  # keyed by window and sequence

    def attend(self, layer: int, q: Tensor, options: Scores, out: Tensor | None) -> Tensor:
        own, window, attended = self.operations, options["window"], []
        for n, (queries, piece) in enumerate(zip(q.split(own.num_new), own.pieces(window), strict=True)):
            k, v = (x.transpose(0, 1) for x in own.read(layer, piece))  # [Hkv, S, D]
            if self.num_masks[n] == 0:
                attended.append(own.operation(queries, k, v, **options))
                continue
            mask = self.masks.get((window, n))
            if mask is None:
                num_real = len(queries) // (1 + self.num_masks[n])
                shape = (piece.end - piece.start - len(queries), num_real, self.num_masks[n], window, q.device)
                mask = self.masks[window, n] = visible_with_masks(*shape)
            scores = {"scale": options["scale"], "softcap": options["softcap"]}
            attended.append(masked_attention(queries, k, v, mask, **scores))
        return torch.cat(attended)


def num_masks_of(batch: Batch) -> Integers:
    """The mask tokens of each sequence, per real token."""
    return padded(batch.num_masks if isinstance(batch, MultiTokenBatch) else np.zeros(0, np.int64), len(batch))


def mask_token_attention(
    config: EngineConfig, model: CausalLM, sizes: PagedSizes, storage: BlockStorage
) -> tuple[PagedAttentionProtocol, Padding]:
    """See :data:`shared.cache.paged_memory.MakeAttention`; phase 9's for an engine without an adapter.

    Raises ConfigError for the backend ``flash`` on a GPU, whose kernels have no masks.
    """
    backend = config.attention_backend
    if config.adapter is None:
        return bucket_attention(config, model, sizes, storage)
    if is_planned(storage, backend):
        buckets = buckets_of(config, model, sizes.max_seq_len)
        options = model.config, sizes, model.dtype, storage, buckets
        arrays = {**OF_TOKENS, "gate": 0}, (*OF_SEQUENCES, "num_masks")
        planned, padding = planned_in_buckets(*options, True, *arrays)
        return MaskTokenAttention(planned, padding), padding
    if launches(storage.keys) and backend == "flash":
        raise ConfigError("attention_backend is 'flash', whose kernels have no mask tokens; choose 'planned'.")
    return MaskTokenOperations(OperationsAttention(storage, backend if backend == "naive" else "sdpa")), NoPadding()
