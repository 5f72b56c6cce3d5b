"""The model's view of a paged KV cache during a step with mask tokens. Introduced in phase 11.1.

Mask tokens lie behind a request's real tokens, and see some of them and some of each other. PyTorch's operations get
the mask of :func:`shared.ops.multi_token.visible_with_masks`, over the keys of one sequence.

Invariants: those of :class:`shared.cache.bucket_view.BucketView`; a step without mask tokens has no gate and runs as
there.
"""

from dataclasses import replace

import torch

from shared.cache.bucket_view import BucketView
from shared.cache.view import StepInputs
from shared.engine.batch import Batch
from shared.engine.multi_token_batch import MultiTokenBatch
from shared.models.lora import FIRST_MASK
from shared.ops.multi_token import masked_attention, visible_with_masks


class MultiTokenView(BucketView):
    """Keys and values in blocks, with mask tokens among the new ones; see ``BatchView``."""

    def load(self, batch: Batch) -> StepInputs:
        """See ``BatchView``; mask tokens open the gate."""
        inputs = super().load(batch)
        self.num_masks = batch.num_masks.tolist() if isinstance(batch, MultiTokenBatch) else []
        self.masks: dict[tuple[int | None, int], torch.Tensor] = {}  # by window and sequence
        if not any(self.num_masks):
            return inputs
        gate = (inputs.tokens.ids >= FIRST_MASK).to(torch.float32)
        return inputs._replace(tokens=replace(inputs.tokens, gate=gate))

    def _attend_gathered(
        self, layer: int, q: torch.Tensor, scale: float, window: int | None, softcap: float | None
    ) -> torch.Tensor:
        if not any(self.num_masks):
            return super()._attend_gathered(layer, q, scale, window, softcap)
        if window not in self.pieces:
            self.pieces[window] = self._cut(window)
        attended = []
        for n, (queries, piece) in enumerate(zip(q.split(self.num_new), self.pieces[window], strict=True)):
            k, v = (x.transpose(0, 1) for x in self._gathered(layer, piece))  # [Hkv, S, D]
            if self.num_masks[n] == 0:
                attended.append(self.attention(queries, k, v, scale=scale, window=window, softcap=softcap))
                continue
            mask = self.masks.get((window, n))
            if mask is None:
                num_real = len(queries) // (1 + self.num_masks[n])
                about = (piece.end - piece.start - len(queries), num_real, self.num_masks[n], window, q.device)
                mask = self.masks[window, n] = visible_with_masks(*about)
            attended.append(masked_attention(queries, k, v, mask, scale=scale, softcap=softcap))
        return torch.cat(attended)
